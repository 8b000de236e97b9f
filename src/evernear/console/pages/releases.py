"""Runs and releases: list, filter, run page, compare, promote and roll back with a reason."""

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from evernear.common.run_record import RunRecord
from evernear.console.access import REPORT_SECURITY_POLICY, require
from evernear.console.services import Services
from evernear.console.web import Form, action, field, page
from evernear.errors import SettingsError, StoreError
from evernear.reporting.page import compare_page, run_page

PAGE_RUNS = 25


class ReleasesPage:
    """Runs and releases."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/releases", self._show),
            Route("/releases/runs", self._listing),
            Route("/releases/promote", action(self._promote), methods=["POST"]),
            Route("/releases/rollback", action(self._roll_back), methods=["POST"]),
            Route("/compare", self._compare),
            Route("/runs/{run}", self._run),
        ]

    def _content(self, request: Request, template: str, notice: str = "") -> Response:
        champion = self._services.registry.champion()
        versions = list(self._services.registry.list())[::-1]
        history = list(self._services.registry.history())[::-1] if champion else []
        return page(
            request,
            template,
            champion=champion,
            releases=[self._services.registry.get(version) for version in versions[:PAGE_RUNS]],
            promoted={promotion.version for promotion in history},
            history=history[:PAGE_RUNS],
            notice=notice,
            **self._runs(request),
        )

    def _runs(self, request: Request) -> dict[str, object]:
        """One page of the runs. Only this page's outcomes are read, unless a filter needs more of them."""
        wanted = request.query_params.get("state", "")
        number = request.query_params.get("page", "1")
        first = PAGE_RUNS * (max(1, int(number)) - 1) if number.isdecimal() and len(number) < 6 else 0
        found: list[tuple[object, object]] = []
        skipped = 0
        for entry in self._services.records.entries():
            outcome = self._services.records.outcome(entry.run) if wanted or skipped >= first else None
            if wanted and (outcome.state if outcome else "in progress") != wanted:
                continue
            skipped += 1
            if skipped > first:
                found.append((entry, outcome))
            if len(found) > PAGE_RUNS:
                break
        return {
            "runs": found[:PAGE_RUNS],
            "state": wanted,
            "number": first // PAGE_RUNS + 1,
            "more": len(found) > PAGE_RUNS,
        }

    def _show(self, request: Request) -> Response:
        return self._content(request, "releases.html.j2")

    def _listing(self, request: Request) -> Response:
        return page(request, "run_list.html.j2", **self._runs(request))

    def _run(self, request: Request) -> Response:
        record = RunRecord(self._services.store, request.path_params["run"])
        return _report((record.get("run.html") or b"").decode() or run_page(record))

    def _compare(self, request: Request) -> Response:
        names = request.query_params.getlist("run")
        if len(names) != 2:
            raise SettingsError("Select two runs to compare.")
        first, second = (RunRecord(self._services.store, name) for name in names)
        return _report(compare_page(first, second))

    def _promote(self, request: Request, form: Form) -> Response:
        person = require(request, "promote")
        sentence = self._services.runner.promote(
            field(form, "version"), _why(form), person.name, force=field(form, "force") == "yes"
        )
        return self._content(request, "releases_content.html.j2", sentence)

    def _roll_back(self, request: Request, form: Form) -> Response:
        person = require(request, "promote")
        sentence = self._services.runner.roll_back(field(form, "version"), _why(form), person.name)
        return self._content(request, "releases_content.html.j2", sentence)


def _why(form: Form) -> str:
    """The reason for the history.

    Raises:
        SettingsError: it is missing.
    """
    why = field(form, "why")
    if not why:
        raise SettingsError("Type a reason first; the history of the releases shows it.")
    return why[:1000]


def _report(content: str) -> Response:
    if not content:
        raise StoreError("The run has no page.")
    return HTMLResponse(content, headers={"Content-Security-Policy": REPORT_SECURITY_POLICY})
