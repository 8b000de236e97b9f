"""The watcher: a complete check (observe, decide, act, save the report), and the process that
repeats it.

SIGTERM or Ctrl-C ends the process after the current check. A killed check leaves no incomplete
state.
"""

import json
import logging
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from evernear.common.output import print_line, quantity
from evernear.common.retry import backoff_s
from evernear.common.store import Store, open_store
from evernear.errors import EvernearError, SettingsError
from evernear.maintenance.prune import prune_store
from evernear.review.queue import remove_submissions
from evernear.serving.configuration import logged_queries
from evernear.serving.endpoints import bind_error, home_of
from evernear.serving.live_queries import remove_before
from evernear.serving.query_log import ship_query_log
from evernear.settings import Settings
from evernear.triggers.requests import RequestStore
from evernear.triggers.watch.baker import BAKE_INTERVAL_S, Baker
from evernear.triggers.watch.decide import decide_action
from evernear.triggers.watch.observe import Observer, attempt
from evernear.triggers.watch.proposals import Proposer
from evernear.triggers.watch.schedule_state import CheckReport, ScheduleStore

if TYPE_CHECKING:
    from evernear.kubeflow.client import KfpRuns

FIRST_RETRY_S = 30.0
PERIOD_CHECKS = 10
"""The shortest period of the checks, as a multiple of the duration of the last check: most of it is
the listing of the source, which is a load for its server."""
STUCK_AFTER_S = 1800.0
PRUNE_INTERVAL_S, PRUNE_RETRY_S = 24 * 3600.0, 3600.0
FIGURES = {
    "live_labels": "Live queries of the champion that were labeled in this month and the one before.",
    "live_accuracy": "Share of these queries with the right label, whether or not they are called unknown.",
    "live_accuracy_low": "Lower end of the 95% interval of evernear_live_accuracy.",
    "live_accuracy_high": "Upper end of the 95% interval of evernear_live_accuracy.",
    "class_mix_difference": "Share of live queries that would need another predicted class for the reference's mix.",
}
"""Figures in a `CheckReport` that are exported as ``evernear_<figure>`` with the label
``version``."""
_TIME = "%Y-%m-%d %H:%M"
_log = logging.getLogger(__name__)
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
        self._requests = RequestStore(store)
        self._runs = runs
        self._clock = clock

    def check(self, act: bool = True) -> CheckReport:
        """Check once. If ``act`` is set, propose the decision or start its run, and save the report
        in the store.

        Failures that do not affect the decision are reported in ``faults``.

        Raises:
            EvernearError: the store is unavailable, or the champion cannot be read.
        """
        now, faults = self._clock(), list[str]()
        removal = attempt(lambda: self._maintain_logs(now, faults), faults) if act else ""
        observation = self._observer.observe(now)
        now = min(now, self._clock())  # the clock may have been set in the meantime
        decision = decide_action(observation, self._settings)
        proposer = Proposer(self._settings, self._store, self._requests, self._runs, decision, observation, now)
        outcome = attempt(lambda: proposer.act(self.schedule.read().id), faults) if act else None
        request, reason = outcome or (None, "")
        report = CheckReport(
            at=now,
            source=observation.source,
            champion=observation.champion or "",
            action=decision.action,
            reasons=(*decision.reasons, *filter(None, [reason, removal])),
            figures=decision.figures,
            faults=(*faults, *observation.faults),
            proposal=request.id if request else None,
        )
        if act:
            self.schedule.save(report)
        return report

    def _maintain_logs(self, now: datetime, faults: list[str]) -> str:
        """Upload the query logs of a server on this machine, and remove those that were already too
        old at the time of the last check. Returns a sentence for the report, or an empty string.

        If a clock jumps ahead, all logs become too old at once. The first check after the jump only
        warns, and removes no logs.
        """
        attempt(lambda: ship_query_log(logged_queries(home_of(self._settings.workdir)), self._store), faults)
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


class LastCheck(Collector):
    """The metrics of the last check."""

    report: CheckReport | None = None

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for figure, meaning in FIGURES.items():
            family = GaugeMetricFamily(f"evernear_{figure}", meaning, labels=("version",))
            if self.report and figure in self.report.figures:
                family.add_metric((self.report.champion,), self.report.figures[figure])
            yield family


class WatchService:
    """The process: repeats the checks, the polls of a `Baker`, and the pruning of the store."""

    def __init__(
        self,
        watcher: Watcher,
        settings: Settings,
        baker: Baker | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watcher = watcher
        self._watch = settings.watch
        self._store_uri = settings.store_uri
        self._baker = baker
        self._bake_fault = ""
        self._clock_s = clock_s
        self._ended_s, self._wait_s = clock_s(), float(settings.watch.interval_s)
        self._failures = 0
        self._status = ""
        self.last = LastCheck()
        self.stopping = Event()

    def run(self) -> None:
        """Repeat everything until `stopping` is set.

        Raises:
            ServingError: the port of the health probe cannot be bound.
        """
        tasks = [self.check]
        if self._baker:
            tasks.append(self.bake)
        if self._watch.prune_keep:
            tasks.append(self.prune)
        with self._serve_probe(), ThreadPoolExecutor(len(tasks)) as threads:
            list(threads.map(self._repeat, tasks))

    def _repeat(self, task: Callable[[], float]) -> None:
        while not self.stopping.is_set():
            self.stopping.wait(task())

    def check(self) -> float:
        """Check, unless the watcher is paused. Returns the seconds until the next check."""
        begin_s = self._clock_s()
        fault = _fault_of(self._check)
        self._ended_s = self._clock_s()
        if fault:
            self._failures += 1
            self._wait_s = backoff_s(self._failures, FIRST_RETRY_S, self._watch.interval_s)
            self._report(f"{fault} Retrying in {self._wait_s:.0f} s.")
        else:
            self._failures = 0
            took_s = self._ended_s - begin_s
            period_s = max(self._watch.interval_s, PERIOD_CHECKS * took_s)
            self._wait_s = period_s - took_s
            if period_s > self._watch.interval_s:
                _print(f"The check took {took_s:.0f} s, so the next one is in {self._wait_s:.0f} s.")
        return self._wait_s

    def bake(self) -> float:
        """Poll the baker, unless the watcher is paused. A lasting failure is reported once."""
        fault = _fault_of(self._bake)
        if fault and fault != self._bake_fault:
            _print(f"The bake is interrupted: {fault} Retrying in {BAKE_INTERVAL_S:.0f} s.")
        self._bake_fault = fault
        return BAKE_INTERVAL_S

    def prune(self) -> float:
        """Prune the store. A run in progress is a failure, which is repeated soon."""
        if fault := _fault_of(self._prune):
            _print(f"{fault} Pruning again in {PRUNE_RETRY_S / 3600:.0f} h.")
        return PRUNE_RETRY_S if fault else PRUNE_INTERVAL_S

    def health(self) -> tuple[bool, dict[str, object]]:
        """Whether checks complete, with details."""
        age_s = self._clock_s() - self._ended_s
        return age_s < self._wait_s + STUCK_AFTER_S, {
            "seconds_since_last_check": round(age_s),
            "consecutive_failures": self._failures,
            "status": self._status,
        }

    def _check(self) -> str:
        if not self._watcher.schedule.read().on:
            self._report("Paused; `evernear watch --on` resumes it.")
            return ""
        report = self.last.report = self._watcher.check()
        self._report(": ".join([report.action, *filter(None, [" ".join(report.reasons)])]))
        return " ".join(report.faults)

    def _bake(self) -> str:
        if self._baker and self._watcher.schedule.read().on and (sentence := self._baker.poll()):
            _print(sentence)
        return ""

    def _prune(self) -> str:
        if keep := self._watch.prune_keep:
            _print(f"Pruned the store: deleted {prune_store(open_store(self._store_uri), keep)}.")
        return ""

    def _report(self, sentence: str) -> None:
        self._status = sentence
        _print(sentence)

    @contextmanager
    def _serve_probe(self) -> Generator[None]:
        """Serve ``GET /metrics``, and a probe at all other paths: the status 200 or 503, with the
        details from `health`."""
        host, port = self._watch.health_host, self._watch.health_port
        if not port:
            yield
            return
        registry = CollectorRegistry()
        registry.register(self.last)
        try:
            server, _ = start_http_server(port, host, registry)
        except OSError as error:
            raise bind_error(error, host, port, "watch.health_port") from None
        metrics: Any = server.get_app()

        def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            if environ["PATH_INFO"] == "/metrics":
                return metrics(environ, start_response)
            is_healthy, details = self.health()
            status = "200 OK" if is_healthy else "503 Service Unavailable"
            start_response(status, [("Content-Type", "application/json")])
            return [json.dumps(details).encode() + b"\n"]

        server.set_app(answer)
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()


def _fault_of(act: Callable[[], str]) -> str:
    """The fault that ``act`` returns or raises."""
    try:
        return act()
    except EvernearError as error:
        return str(error)
    except Exception as error:  # an internal error must not end the process
        _log.exception("Internal error.")
        return f"Internal error: {type(error).__name__}: {error}"


def _print(sentence: str) -> None:
    print_line(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {sentence}")
