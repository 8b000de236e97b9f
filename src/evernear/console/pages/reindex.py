"""The part of the Review page that starts a reindex, and polls one line with its state."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from evernear.console.backend import Backend
from evernear.console.runs import RunState
from evernear.console.web import Form, action, page

_ENDED_EVENT = "run-ended"
"""The event on which other parts of the Review page load again."""


class ReindexPart:
    """The button of the Review page that starts a reindex, and the line below it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/review/reindex", self._show),
            Route("/review/reindex", action(self._start), methods=["POST"]),
        ]

    def _start(self, request: Request, _: Form) -> Response:
        runner = self._backend.runner
        self._backend.perform(request, "start", "start", lambda user: runner.reindex(user.name))
        return _line(request, runner.state())

    def _show(self, request: Request) -> Response:
        """The line. A browser that saw the run in progress also receives the event that the run has
        ended."""
        state = self._backend.runner.state()
        response = _line(request, state)
        if "watching" in request.query_params and not state.is_running:
            response.headers["HX-Trigger"] = _ENDED_EVENT
        return response


def _line(request: Request, state: RunState) -> Response:
    return page(request, "reindex.html.j2", state=state)
