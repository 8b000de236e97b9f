"""The watcher's process: check on a schedule, and soon after the bucket reports a change.

SIGTERM or Ctrl-C ends the process after the current check. A killed check leaves no incomplete
state. If the source, the store or the pipeline server is unavailable, the check is retried with
backoff, before the next scheduled check.
"""

import json
import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from apscheduler.schedulers.background import BackgroundScheduler
from prometheus_client import CONTENT_TYPE_LATEST

from evernear.common.output import print_line
from evernear.common.retry import backoff_s
from evernear.common.store import open_store
from evernear.errors import EvernearError, ServingError
from evernear.maintenance.prune import prune_store
from evernear.serving.endpoints import create_listener, host_and_port
from evernear.settings import Settings
from evernear.triggers.watch.baker import Baker
from evernear.triggers.watch.bucket_events import SettingsError, listen
from evernear.triggers.watch.metrics import exposition
from evernear.triggers.watch.schedule_state import CheckReport
from evernear.triggers.watch.watcher import Watcher

FIRST_RETRY_S = 30.0
DEBOUNCE_S = 60.0
"""Quiet time after the last change in the bucket before a check. An upload of many files is then
one check."""
DEBOUNCE_MAX = 10
"""Maximum delay of a check if further changes keep arriving, as a multiple of `DEBOUNCE_S`."""
STUCK_AFTER_S = 1800.0
CLOCK_CHECK_S = 60.0
PRUNE_INTERVAL = timedelta(days=1)
PRUNE_RETRY = timedelta(hours=1)
"""Time to wait before pruning the store again, if a prune failed or found a run in progress."""
BAKE_INTERVAL_S = 10.0
"""Time between two reads of the pods' metrics. A rollback begins within seconds of a breach."""
_JOB = "check"
_BAKE_JOB = "bake"
_PRUNE_JOB = "prune"
_log = logging.getLogger(__name__)


class WatchService:
    """The schedule of a `Watcher` and an optional `Baker`."""

    def __init__(self, watcher: Watcher, settings: Settings, baker: Baker | None = None) -> None:
        self._watcher = watcher
        self._baker = baker
        self._bake_fault = ""
        self._settings = settings
        self._scheduler = BackgroundScheduler(timezone=UTC)
        self._lock = threading.Lock()
        self._changed_s: float | None = None
        """Time of the first change since the last check began."""
        self._failures = 0
        self._ended_s = time.monotonic()
        self._status = ""
        self._last: CheckReport | None = None
        self.stopping = threading.Event()

    def run(self) -> None:
        """Check on the schedule until `stopping` is set.

        Raises:
            ServingError: the port of the health probe cannot be bound.
        """
        with self._health_probe():
            self._scheduler.add_job(
                self.check,
                "interval",
                seconds=self._settings.watch.interval_s,
                id=_JOB,
                next_run_time=datetime.now(UTC),
                max_instances=1,
                coalesce=True,
                misfire_grace_time=None,
            )
            if keep := self._settings.watch.prune_keep:
                self._scheduler.add_job(
                    self.prune,
                    "interval",
                    args=(keep,),
                    seconds=PRUNE_INTERVAL.total_seconds(),
                    id=_PRUNE_JOB,
                    next_run_time=datetime.now(UTC),
                    max_instances=1,
                    coalesce=True,
                    misfire_grace_time=None,
                )
            if self._baker:
                self._scheduler.add_job(
                    self.bake, "interval", seconds=BAKE_INTERVAL_S, id=_BAKE_JOB, max_instances=1, coalesce=True
                )
            self._scheduler.start()
            threading.Thread(target=self._listen, name="bucket-events", daemon=True).start()
            try:
                while not self.stopping.wait(CLOCK_CHECK_S):
                    self._follow_clock()
            finally:
                with self._lock:  # no job is scheduled at this moment, nor later
                    self.stopping.set()
                self._scheduler.shutdown(wait=True)

    def check(self) -> None:
        """Run a check, unless the watcher is paused. If the check fails, the failure is reported
        and the check is retried soon."""
        with self._lock:
            self._changed_s = None
        try:
            if faults := self._check():
                self._retry(" ".join(faults))
            else:
                self._failures = 0
        except EvernearError as error:
            self._retry(str(error))
        except Exception as error:  # an internal error must not end the process
            _log.exception("The check failed.")
            self._retry(f"Internal error: {type(error).__name__}: {error}")
        finally:
            self._ended_s = time.monotonic()
            with self._lock:
                is_changed = self._changed_s is not None
            if is_changed:  # during the check
                self._run_in(_JOB, timedelta(seconds=DEBOUNCE_S))

    def prune(self, keep: int) -> None:
        """Prune the store to ``keep`` releases.

        If pruning fails or a run is in progress, pruning is retried later.
        """
        try:
            pruning = prune_store(open_store(self._settings.store_uri), keep)
        except EvernearError as error:
            self._print(f"{error} Pruning again in {PRUNE_RETRY.total_seconds() / 3600:.0f} h.")
            self._run_in(_PRUNE_JOB, PRUNE_RETRY)
        else:
            self._print(f"Pruned the store: deleted {pruning}.")

    def bake(self) -> None:
        """Poll the baker unless the watcher is paused. A failure is reported once, and the next
        poll tries again."""
        try:
            if self._baker is None or not self._watcher.schedule.read().on:
                return
            sentence, fault = self._baker.poll(), ""
        except EvernearError as error:
            sentence = fault = f"The bake is interrupted: {error} Trying again in {BAKE_INTERVAL_S:.0f} s."
        except Exception as error:  # an internal error must not end the process
            _log.exception("The bake failed.")
            sentence = fault = f"The bake is interrupted by an internal error: {type(error).__name__}: {error}"
        if sentence and sentence != self._bake_fault:
            self._print(sentence)
        self._bake_fault = fault

    def changed(self) -> None:
        """Schedule a check for the time when the source has not changed for `DEBOUNCE_S`
        seconds."""
        now_s = time.monotonic()
        with self._lock:
            self._changed_s = self._changed_s or now_s
            left_s = self._changed_s + DEBOUNCE_MAX * DEBOUNCE_S - now_s
        self._run_in(_JOB, timedelta(seconds=max(0.0, min(DEBOUNCE_S, left_s))))

    def health(self) -> tuple[bool, dict[str, object]]:
        """Whether checks complete, with details."""
        since_s = time.monotonic() - self._ended_s
        is_healthy = self._scheduler.running and since_s < self._settings.watch.interval_s + STUCK_AFTER_S
        return is_healthy, {
            "seconds_since_last_check": round(since_s),
            "consecutive_failures": self._failures,
            "status": self._status,
        }

    def _check(self) -> tuple[str, ...]:
        if not self._watcher.schedule.read().on:
            self._report("Paused; `evernear watch --on` resumes it.")
            return ()
        report = self._last = self._watcher.check()
        self._report(f"{report.action}: {' '.join(report.reasons)}")
        return report.faults

    def _retry(self, sentence: str) -> None:
        self._failures += 1
        wait_s = backoff_s(self._failures, FIRST_RETRY_S, self._settings.watch.interval_s)
        self._report(f"{sentence} Retrying in {wait_s:.0f} s.")
        self._run_in(_JOB, timedelta(seconds=wait_s))

    def _run_in(self, job_id: str, wait: timedelta) -> None:
        """Set the next start of a job to ``wait`` from now, unless the process ends.

        `BackgroundScheduler.shutdown` holds the scheduler's lock until the jobs have ended. A job
        that called the scheduler during the shutdown would wait forever.
        """
        with self._lock:
            job = None if self.stopping.is_set() else self._scheduler.get_job(job_id)
            if job is not None:
                job.modify(next_run_time=datetime.now(UTC) + wait)

    def _follow_clock(self) -> None:
        """Correct the schedule after the clock was set back.

        If the clock had jumped ahead before, the next check could otherwise be scheduled years in
        the future.
        """
        intervals = {_JOB: timedelta(seconds=self._settings.watch.interval_s), _PRUNE_JOB: PRUNE_INTERVAL}
        intervals[_BAKE_JOB] = timedelta(seconds=BAKE_INTERVAL_S)
        for name, interval in intervals.items():
            job, latest = self._scheduler.get_job(name), datetime.now(UTC) + interval
            if job is not None and job.next_run_time > latest:
                job.modify(next_run_time=latest)

    def _listen(self) -> None:
        """Listen for changes to the bucket, and reconnect with backoff."""
        failures = 0
        while not self.stopping.is_set():
            begin_s = time.monotonic()
            reason = "the server closed the connection."
            try:
                listen(self._watcher.source(), self.changed)
            except SettingsError as error:
                self._report(str(error))
                return
            except EvernearError as error:
                reason = str(error)
            except Exception as error:  # an internal error must not end the notifications
                _log.exception("Listening for bucket notifications failed.")
                reason = f"internal error: {type(error).__name__}: {error}"
            if self.stopping.is_set():
                return
            failures = 1 if time.monotonic() - begin_s > FIRST_RETRY_S else failures + 1
            wait_s = backoff_s(failures, FIRST_RETRY_S, self._settings.watch.interval_s)
            self._report(f"Bucket notifications are unavailable: {reason} Retrying in {wait_s:.0f} s.")
            self.stopping.wait(wait_s)

    def _report(self, sentence: str) -> None:
        self._status = sentence
        self._print(sentence)

    def _print(self, sentence: str) -> None:
        print_line(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {sentence}")

    @contextmanager
    def _health_probe(self) -> Generator[None]:
        """Serve ``GET /`` on ``watch.health_port``. The response has status 200 or 503, and its
        body contains the details from `health`.

        ``GET /metrics`` returns the metrics of the last check.
        """
        watch, health, metrics = self._settings.watch, self.health, lambda: exposition(self._last)
        if not watch.health_port:
            yield
            return

        class Probe(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, metrics())
                    return
                is_healthy, details = health()
                self._answer(200 if is_healthy else 503, "application/json", json.dumps(details).encode() + b"\n")

            def _answer(self, status: int, content_type: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        try:
            listener = create_listener(watch.health_host, watch.health_port)
        except OSError as error:
            address = host_and_port(watch.health_host, watch.health_port)
            raise ServingError(
                f"The health probe cannot listen on {address} ({error.strerror});"
                " set watch.health_port to a free one, or to 0."
            ) from None
        server = ThreadingHTTPServer(listener.getsockname()[:2], Probe, bind_and_activate=False)
        server.socket.close()
        server.socket = listener
        threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
