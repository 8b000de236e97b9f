"""The part of the Review page that starts a reindex, and polls one line with its state."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from evernear.triggers.console.runs import RunState
from evernear.triggers.console.services import Services
from evernear.triggers.console.web import Form, action, page

_ENDED_EVENT = "run-ended"
"""The event on which other parts of the Review page load again."""


class ReindexPart:
    """The button of the Review page that starts a reindex, and the line below it."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/review/reindex", self._show),
            Route("/review/reindex", action(self._start), methods=["POST"]),
        ]

    def _start(self, request: Request, _: Form) -> Response:
        runner = self._services.runner
        self._services.perform(request, "start", "start", lambda person: runner.reindex(person.name))
        return _line(request, runner.state())

    def _show(self, request: Request) -> Response:
        """The line. A browser that saw the run in progress also receives the event that the run has
        ended."""
        state = self._services.runner.state()
        response = _line(request, state)
        if "watching" in request.query_params and not state.is_running:
            response.headers["HX-Trigger"] = _ENDED_EVENT
        return response


def _line(request: Request, state: RunState) -> Response:
    return page(request, "reindex.html.j2", state=state)
