"""The Runs page: how each run ended, its page, and the comparison of two."""

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from evernear.common.run_record import RunRecord
from evernear.console.backend import Backend
from evernear.console.web import page, page_number
from evernear.errors import DataError, MissingObjectError
from evernear.reporting.page import compare_page
from evernear.reporting.runs import RunList

PAGE_RUNS = 50
_OF_RUN_PAGES = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)
"""Run pages are self-contained files without scripts."""


class RunsPage:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._runs = RunList(backend.store)

    def routes(self) -> list[Route]:
        return [
            Route("/runs", self._show),
            Route("/runs/compare", self._compare),
            Route("/runs/page/{run}", self._page),
        ]

    def _show(self, request: Request) -> Response:
        listed = self._runs.page(PAGE_RUNS * (page_number(request) - 1), PAGE_RUNS)
        return page(
            request,
            "runs.html.j2",
            runs=listed.runs,
            faults=listed.faults,
            number=listed.first // PAGE_RUNS + 1,
            pages=max(1, -(-listed.total // PAGE_RUNS)),
        )

    def _compare(self, request: Request) -> Response:
        chosen = request.query_params.getlist("run")
        if len(chosen) != 2:
            raise DataError("Select two runs to compare.")
        first, second = sorted(chosen)
        store = self._backend.store
        return _run_page(compare_page(RunRecord(store, first), RunRecord(store, second)))

    def _page(self, request: Request) -> Response:
        run = request.path_params["run"]
        html = RunRecord(self._backend.store, run).get("run.html")
        if html is None:
            raise MissingObjectError(
                f"Run {run} has no page: it is in progress, was killed, or its images were forgotten."
            )
        return _run_page(html)


def _run_page(html: str | bytes) -> Response:
    return HTMLResponse(html, headers={"Content-Security-Policy": _OF_RUN_PAGES})
