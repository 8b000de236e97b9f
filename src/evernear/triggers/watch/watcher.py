"""One look from end to end: gather, see, decide, act, remember."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from evernear.errors import EvernearError, SettingsError
from evernear.serving.configuration import logged_queries
from evernear.serving.endpoints import home_of
from evernear.serving.query_log import ship
from evernear.settings import Settings
from evernear.store import Store
from evernear.triggers.watch.act import Actor, Done
from evernear.triggers.watch.decide import decide
from evernear.triggers.watch.look import Looker
from evernear.triggers.watch.queries import remove_before
from evernear.triggers.watch.switch import LastLook, Switch

if TYPE_CHECKING:
    from evernear.kubeflow.client import KfpRuns

Clock = Callable[[], datetime]


class Watcher:
    """Watches one source for one store. ``cache`` is a directory of its own; what lies there is only a copy."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        runs: "KfpRuns | None",
        cache: Path,
        clock: Clock = lambda: datetime.now(UTC),
    ) -> None:
        """``runs`` is the pipeline server; None: there is none, so proposals are only written down.

        Raises:
            SettingsError: the policy is to start runs, and there is nothing to start them on.
        """
        if settings.watch.policy == "start" and runs is None:
            raise SettingsError(
                "watch.policy=start needs a pipeline server to start runs on: set pipeline.endpoint, or policy=ask."
            )
        self.switch = Switch(store)
        self._settings = settings
        self._store = store
        self._looker = Looker(settings, store, cache)
        self._actor = Actor(settings, store, runs)
        self._clock = clock

    def look(self, act: bool = True) -> LastLook:
        """Look once. With ``act`` what was decided is proposed or started, and the look kept in the store.

        What fails and is not needed to decide is told in the look's ``faults``.

        Raises:
            EvernearError: the store cannot be reached, or it cannot be told what serves.
        """
        now = self._clock()
        faults = self._keep_house(now) if act else []
        sight = self._looker.look(now)
        decision = decide(sight, self._settings)
        done = Done()
        if act:
            try:
                done = self._actor.act(decision, sight, self.switch.read().id, now)
            except EvernearError as error:
                faults.append(str(error))
        look = LastLook(
            at=now,
            action=decision.action,
            reasons=(*decision.reasons, *([done.said] if done.said else [])),
            figures=decision.figures,
            faults=(*faults, *sight.faults),
            proposal=done.proposal.id if done.proposal else None,
        )
        if act:
            self.switch.remember(look)
        return look

    def _keep_house(self, now: datetime) -> list[str]:
        """Ship what a server of this machine logged, and remove what is too old; what failed, in sentences."""
        faults: list[str] = []
        oldest = now - timedelta(seconds=self._settings.watch.query_retention_s)
        for work in (
            lambda: ship(logged_queries(home_of(self._settings.workdir)), self._store),
            lambda: remove_before(self._store, oldest),
        ):
            try:
                work()
            except EvernearError as error:
                faults.append(str(error))
        return faults
