"""A complete check: observe, decide, act, and save the report."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from evernear.common.output import quantity
from evernear.common.store import Store
from evernear.console.queue import remove_submissions
from evernear.errors import EvernearError, SettingsError
from evernear.serving.configuration import logged_queries
from evernear.serving.endpoints import home_of
from evernear.serving.live_queries import remove_before
from evernear.serving.query_log import ship_query_log
from evernear.settings import Settings
from evernear.triggers.watch.decide import decide_action
from evernear.triggers.watch.observe import Observer
from evernear.triggers.watch.proposals import Outcome, ProposalService
from evernear.triggers.watch.schedule_state import CheckReport, ScheduleStore

if TYPE_CHECKING:
    from evernear.kubeflow.client import KfpRuns

_TIME = "%Y-%m-%d %H:%M"
Clock = Callable[[], datetime]


class Watcher:
    """Checks one source for one store. ``cache`` is a directory for downloaded files."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        runs: "KfpRuns | None",
        cache: Path,
        clock: Clock = lambda: datetime.now(UTC),
    ) -> None:
        """``runs`` is the pipeline server. Without a pipeline server, proposals are only stored.

        Raises:
            SettingsError: the policy is to start runs,
                but no pipeline server is configured.
        """
        if settings.watch.policy == "start" and runs is None:
            raise SettingsError(
                "watch.policy=start needs a pipeline server to start runs on: set pipeline.endpoint, or policy=ask."
            )
        self.schedule = ScheduleStore(store)
        self._settings = settings
        self._store = store
        self._observer = Observer(settings, store, cache)
        self._proposals = ProposalService(settings, store, runs)
        self._clock = clock

    def source(self) -> str:
        """The source to watch, from `Observer.source`."""
        return self._observer.source()

    def check(self, act: bool = True) -> CheckReport:
        """Check once. If ``act`` is set, propose the decision or start its run, and save the report
        in the store.

        Failures that do not affect the decision are reported in ``faults``.

        Raises:
            EvernearError: the store is unavailable, or the champion cannot be read.
        """
        now = self._clock()
        removal, faults = self._maintain_logs(now) if act else ("", [])
        observation = self._observer.observe(now)
        now = min(now, self._clock())  # the clock may have been set in the meantime
        decision = decide_action(observation, self._settings)
        outcome = Outcome()
        if act:
            try:
                outcome = self._proposals.act(decision, observation, self.schedule.read().id, now)
            except EvernearError as error:
                faults.append(str(error))
        report = CheckReport(
            at=now,
            source=observation.source,
            champion=observation.champion or "",
            action=decision.action,
            reasons=(*decision.reasons, *filter(None, [outcome.reason, removal])),
            figures=decision.figures,
            faults=(*faults, *observation.faults),
            proposal=outcome.request.id if outcome.request else None,
        )
        if act:
            self.schedule.save(report)
        return report

    def _maintain_logs(self, now: datetime) -> tuple[str, list[str]]:
        """Upload the query logs of a server on this machine, and remove old query logs. Returns a
        report and errors."""
        removal, faults = "", list[str]()
        try:
            ship_query_log(logged_queries(home_of(self._settings.workdir)), self._store)
        except EvernearError as error:
            faults.append(str(error))
        try:
            removal = self._remove_old_logs(now)
        except EvernearError as error:
            faults.append(str(error))
        return removal, faults

    def _remove_old_logs(self, now: datetime) -> str:
        """Remove the query logs that were already too old at the time of the last check. Returns a
        sentence for the report, or an empty string.

        If a clock jumps ahead, all logs become too old at once. The first check after the jump only
        warns, and removes no logs.
        """
        last = self.schedule.read().last
        if last is None:
            return ""
        retention = timedelta(seconds=self._settings.watch.query_retention_s)
        before = min(now, last.at) - retention
        removed = {
            "of logged queries": remove_before(self._store, before),
            "sent to review": remove_submissions(self._store, before),
        }
        if now - last.at > retention:
            return (
                f"The last check was at {last.at:{_TIME}} UTC. If this machine's clock is wrong, set it before the "
                "next check, which removes logged queries and images sent to review from before "
                f"{now - retention:{_TIME}} UTC."
            )
        return " ".join(f"Removed {quantity(n, 'old file')} {which}." for which, n in removed.items() if n)
