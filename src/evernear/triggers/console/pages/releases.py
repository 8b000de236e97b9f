"""The Runs and releases page: list, filter, show and compare runs. Users can also
promote a release or roll back, with a reason."""

from collections.abc import Callable, Iterator, Sequence

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from evernear.common.run_record import RunRecord
from evernear.errors import SettingsError, StoreError
from evernear.reporting.notify import RunOutcome
from evernear.reporting.page import compare_page, run_page
from evernear.triggers.console.access import REPORT_SECURITY_POLICY, Person
from evernear.triggers.console.releases import PAGE_RELEASES
from evernear.triggers.console.run_records import RunEntry
from evernear.triggers.console.runs import Done
from evernear.triggers.console.services import Services
from evernear.triggers.console.web import Form, action, after_warm_up, field, page

PAGE_RUNS = 25


class ReleasesPage:
    """The Runs and releases page."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/releases", after_warm_up(self._show)),
            Route("/releases/runs", self._listing),
            Route("/releases/promote", action(self._promote), methods=["POST"]),
            Route("/releases/rollback", action(self._roll_back), methods=["POST"]),
            Route("/compare", self._compare),
            Route("/runs/{run}", self._run),
        ]

    def _content(self, request: Request, template: str, notice: str = "") -> Response:
        champion = self._services.releases.champion()
        releases, faults = self._services.releases.newest()
        history = self._services.releases.history(champion) if champion else []
        return page(
            request,
            template,
            champion=champion,
            releases=releases,
            faults=faults,
            promoted={promotion.version for promotion in history},
            history=history[:PAGE_RELEASES],
            notice=notice,
            **self._runs(request),
        )

    def _runs(self, request: Request) -> dict[str, object]:
        """The runs on one page of the listing. Without a filter, only the outcomes of
        the listed runs are read."""
        wanted = request.query_params.get("state", "")
        number = request.query_params.get("page", "1")
        first = PAGE_RUNS * (max(1, int(number)) - 1) if number.isdecimal() and len(number) < 6 else 0
        entries = self._services.records.entries()
        if wanted:
            entries = [entry for entry, outcome in self._with_outcomes(entries) if _state(outcome) == wanted]
        shown = entries[first : first + PAGE_RUNS]
        return {
            "runs": list(self._with_outcomes(shown)),
            "state": wanted,
            "number": first // PAGE_RUNS + 1,
            "more": len(entries) > first + PAGE_RUNS,
        }

    def _with_outcomes(self, entries: Sequence[RunEntry]) -> Iterator[tuple[RunEntry, RunOutcome | None]]:
        return zip(entries, self._services.records.outcomes(entries), strict=True)

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
        version, force = field(form, "version"), field(form, "force") == "yes"

        def move(person: Person) -> Done:
            return self._services.runner.promote(version, _why(form), person.name, force=force)

        return self._after(request, "promote", version, move)

    def _roll_back(self, request: Request, form: Form) -> Response:
        version = field(form, "version")

        def move(person: Person) -> Done:
            return self._services.runner.roll_back(version, _why(form), person.name)

        return self._after(request, "roll_back", version, move)

    def _after(self, request: Request, what: str, version: str, move: Callable[[Person], Done]) -> Response:
        done = self._services.perform(request, "promote", what, move, version)
        return self._content(request, "releases_content.html.j2", done.sentence)


def _state(outcome: RunOutcome | None) -> str:
    return outcome.state if outcome else "in progress"


def _why(form: Form) -> str:
    """The reason for a promotion or rollback, for the promotion history.

    Raises:
        SettingsError: the reason is missing.
    """
    why = field(form, "why")
    if not why:
        raise SettingsError("Type a reason first; the history of the releases shows it.")
    return why[:1000]


def _report(content: str) -> Response:
    if not content:
        raise StoreError("The run has no page.")
    return HTMLResponse(content, headers={"Content-Security-Policy": REPORT_SECURITY_POLICY})
