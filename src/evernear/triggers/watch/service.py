"""The process that watches: looks on a schedule, and soon after the bucket tells of a change.

It ends by SIGTERM or Ctrl-C, after the look that is under way; killed at any point it leaves nothing half done. No
failure of the source, the store or the pipeline server ends it: the next look comes sooner than the schedule says,
after half a minute at first and then ever later.
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

from evernear.errors import EvernearError, PortInUseError
from evernear.output import print_line
from evernear.settings import Settings
from evernear.triggers.watch.events import Untold, listen
from evernear.triggers.watch.watcher import Watcher

FIRST_RETRY_S = 30.0
LONGEST_SETTLE = 10
"""A bucket that does not come to rest is looked at after so many times ``watch.debounce_s``."""
STUCK_AFTER_S = 1800.0
_JOB = "look"
_log = logging.getLogger(__name__)


class Service:
    """The schedule around a `Watcher`."""

    def __init__(self, watcher: Watcher, settings: Settings) -> None:
        self._watcher = watcher
        self._settings = settings
        self._scheduler = BackgroundScheduler(timezone=UTC)
        self._lock = threading.Lock()
        self._changed_s: float | None = None
        self._failures = 0
        self._ended_s = time.monotonic()
        self._said = ""
        self.stopping = threading.Event()

    def run(self) -> None:
        """Watch until `stopping` is set.

        Raises:
            PortInUseError: the health probe's port cannot be bound.
        """
        with self._health():
            now = datetime.now(UTC)
            self._scheduler.add_job(
                self.tick,
                "interval",
                seconds=self._settings.watch.interval_s,
                id=_JOB,
                next_run_time=now,
                max_instances=1,
                coalesce=True,
                misfire_grace_time=None,
            )
            self._scheduler.start()
            if self._settings.watch.bucket_events:
                threading.Thread(target=self._listen_for_ever, name="bucket-events", daemon=True).start()
            try:
                self.stopping.wait()
            finally:
                self._scheduler.shutdown(wait=True)

    def tick(self) -> None:
        """Look; whatever fails is said, and tried again soon."""
        with self._lock:
            self._changed_s = None
        try:
            if faults := self._look():
                self._retry(" ".join(faults))
            else:
                self._failures = 0
        except EvernearError as error:
            self._retry(str(error))
        except Exception as error:  # a fault of ours must not end the watch either
            _log.exception("The look failed.")
            self._retry(f"evernear itself failed: {type(error).__name__}: {error}")
        finally:
            self._ended_s = time.monotonic()
            with self._lock:
                changed = self._changed_s is not None
            if changed:  # while the look was under way
                self._look_in(self._settings.watch.debounce_s)

    def changed(self) -> None:
        """The source changed: look when it has come to rest."""
        debounce_s, now_s = self._settings.watch.debounce_s, time.monotonic()
        with self._lock:
            self._changed_s = self._changed_s or now_s
            left_s = self._changed_s + LONGEST_SETTLE * debounce_s - now_s
        self._look_in(max(0.0, min(debounce_s, left_s)))

    def health(self) -> tuple[bool, dict[str, object]]:
        """Whether looks come to an end as they should, and what is told of it."""
        since_s = time.monotonic() - self._ended_s
        alive = self._scheduler.running and since_s < self._settings.watch.interval_s + STUCK_AFTER_S
        told: dict[str, object] = {
            "seconds_since_last_look": round(since_s),
            "failures_in_a_row": self._failures,
            "said": self._said,
        }
        return alive, told

    def _look(self) -> tuple[str, ...]:
        """Look, if the switch is on; what could not be looked at or done, a sentence each."""
        if not self._watcher.switch.read().on:
            self._say("Switched off; `evernear watch start` switches it on.")
            return ()
        look = self._watcher.look()
        self._say(f"{look.action}: {' '.join(look.reasons)}")
        return look.faults

    def _retry(self, sentence: str) -> None:
        self._failures += 1
        wait_s = min(self._settings.watch.interval_s, FIRST_RETRY_S * 2 ** min(self._failures - 1, 16))
        self._say(f"{sentence} The next look is in {wait_s:.0f} s.")
        self._look_in(wait_s)

    def _look_in(self, wait_s: float) -> None:
        """Have the next look ``wait_s`` from now."""
        job = self._scheduler.get_job(_JOB)
        if job is not None and not self.stopping.is_set():
            job.modify(next_run_time=datetime.now(UTC) + timedelta(seconds=wait_s))

    def _listen_for_ever(self) -> None:
        failures = 0
        while not self.stopping.is_set():
            begin_s = time.monotonic()
            try:
                listen(self._settings.data.source, self.changed)
            except Untold as error:
                self._say(str(error))
                return
            except EvernearError as error:
                self._say(f"Changes of the bucket are not told at the moment: {error}")
            except Exception as error:  # the client's, at what it does not expect in the stream
                _log.exception("The bucket's changes could not be listened to.")
                self._say(f"Changes of the bucket are not told at the moment: {type(error).__name__}: {error}")
            failures = 0 if time.monotonic() - begin_s > FIRST_RETRY_S else failures + 1
            self.stopping.wait(min(self._settings.watch.interval_s, FIRST_RETRY_S * 2 ** min(failures, 16)))

    def _say(self, sentence: str) -> None:
        self._said = sentence
        print_line(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {sentence}")

    @contextmanager
    def _health(self) -> Generator[None]:
        """Answer ``GET /`` with 200 or 503, and what `health` tells, on the port of the settings."""
        watch, health = self._settings.watch, self.health
        if not watch.health_port:
            yield
            return

        class Probe(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                alive, told = health()
                self.send_response(200 if alive else 503)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(told).encode() + b"\n")

            def log_message(self, format: str, *args: object) -> None:
                pass

        try:
            server = ThreadingHTTPServer((watch.health_host, watch.health_port), Probe)
        except OSError as error:
            raise PortInUseError(
                f"The health probe cannot listen on {watch.health_host}:{watch.health_port} ({error.strerror});"
                " set watch.health_port to a free one, or to 0."
            ) from None
        threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
