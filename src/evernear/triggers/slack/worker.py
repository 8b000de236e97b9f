"""The worker: advance every open request by one state per poll.

A failed step is retried with exponential backoff. Every completed step is stored immediately, and
repeating a step has no effect. A new process therefore continues where the previous process
stopped.
"""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from evernear.common.output import log_fields
from evernear.common.retry import backoff_s
from evernear.errors import ConflictError, EvernearError, SlackError
from evernear.triggers.requests import POLICY, Request
from evernear.triggers.slack import promotions, prompts
from evernear.triggers.slack.blocks import duration, error_text, line
from evernear.triggers.slack.commands import help_message
from evernear.triggers.slack.runs import RunTracker, starting
from evernear.triggers.slack.services import Services

BACKOFF_S, BACKOFF_MAX_S = 5.0, 300.0
FAILURES_MAX = 300
"""Number of consecutive failures after which a request fails. With a backoff of `BACKOFF_MAX_S`,
this number is reached after about a day."""
FOLLOW_MAX_AGE = timedelta(days=1)
"""Maximum age of a run that the watcher started without approval. Older runs are not reported."""
START_TIMEOUT = timedelta(hours=1)
"""Time to retry starting a run while Kubeflow Pipelines is unavailable. Whoever asked for a run has
then turned to something else."""
_log = logging.getLogger(__name__)


class Worker:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._runs = RunTracker(services)
        self._failed: dict[str, tuple[int, datetime]] = {}
        """The number of consecutive failures of a step, and the time of its next attempt. After a
        restart, every step is due."""
        self._removed_old = services.clock()

    def poll(self) -> None:
        """Advance all requests. Raises no exception. Outside a cluster, a promotion takes as long
        as the server needs to load the release."""
        self._attempt("requests", self._advance_all)
        if self._services.clock() - self._removed_old > timedelta(hours=1):
            self._removed_old = self._services.clock()
            self._attempt("removal", lambda: self._services.requests.remove_old(self._services.clock()))

    def _advance_all(self) -> None:
        for request in self._services.requests.list():
            if self._is_due(request):
                with log_fields(request=request.id, run=request.run, release=request.release):
                    self._attempt(request.id, lambda request=request: self._advance(request))

    def _is_due(self, request: Request) -> bool:
        if not request.is_proposal or request.message:
            return request.is_open
        if not self._services.settings.slack.channel or (request.state == "accepted" and request.by == POLICY):
            return False  # no channel to report to, or the watcher is about to start the run
        is_recent = self._services.clock() - (request.answered or request.created) < FOLLOW_MAX_AGE
        return request.is_open and (is_recent or request.state != "started")

    def _attempt(self, name: str, step: Callable[[], None]) -> None:
        """Run ``step``, unless it must wait after a failure."""
        failures, due = self._failed.get(name, (0, self._services.clock()))
        if self._services.clock() < due:
            return
        try:
            step()
        except ConflictError:
            return  # a click changed the request first, and the next poll reads it
        except EvernearError as error:
            _log.warning("%s: %s Retrying later.", name, error)
        except Exception:  # an internal error in one request must not stop other requests
            _log.exception("%s: internal error; retrying later", name)
        else:
            self._failed.pop(name, None)
            return
        wait_s = backoff_s(failures + 1, BACKOFF_S, BACKOFF_MAX_S)
        self._failed[name] = failures + 1, self._services.clock() + timedelta(seconds=wait_s)

    def _advance(self, request: Request) -> None:
        try:
            self._step(request)
        except ConflictError:
            raise
        except Exception as error:
            self._report_failure(request.id, error)
            raise

    def _step(self, request: Request) -> None:
        services = self._services
        match request.kind, request.state:
            case _, "pending":
                prompts.advance(services, request)
            case _, "declined" | "expired":
                prompts.close(services, request)
            case _, "started":
                self._runs.follow(request)
            case "run", _:
                self._runs.start(request)
            case "stop", _:
                self._runs.stop(request)
            case "help", _:
                services.slack.post(request.channel, help_message(), request.thread)
                services.finish(request, "ended")
            case _ if services.settings.target != "kubernetes":
                promotions.move(services, request)
            case _:
                prepared = promotions.prepare_run(services, request)
                if prepared is not None:
                    self._runs.start(prepared)

    def _report_failure(self, request_id: str, error: Exception) -> None:
        """Report the first failure of a request, and end a request that has failed too often."""
        services = self._services
        request, (failures, _) = services.requests.find(request_id), self._failed.get(request_id, (0, None))
        if request is None or not request.is_open or (request.is_proposal and request.state == "pending"):
            return
        text = error_text(error)
        waited = services.clock() - (request.answered or request.created)
        is_waited_for = request.state == "accepted" or (request.state == "pending" and not request.message)
        if (isinstance(error, SlackError) and error.reason == "not_writable") or failures >= FAILURES_MAX:
            _log.error("%s: %s Given up.", request_id, text)
            services.finish(request, "failed")
        elif is_waited_for and waited > START_TIMEOUT:
            self._give_up(request, f"{text} Given up after {duration(waited)}; repeat the command.")
        elif failures == 0 and not isinstance(error, SlackError) and (is_waited_for or request.state == "started"):
            self._report_retry(request, text)

    def _give_up(self, request: Request, text: str) -> None:
        if request.message:
            self._runs.give_up(request, text)
        else:
            self._services.notify(request, text)
            self._services.finish(request, "failed")

    def _report_retry(self, request: Request, text: str) -> None:
        if request.state == "started" and request.message:
            channel, _, thread = request.message.partition("/")
            lost = line(f"The status of the run is unknown; the run itself continues. {text} Retrying.")
            self._services.slack.post(channel, lost, thread)
        elif request.message:
            self._services.slack.edit(request.message, starting(request, text))
        else:
            self._services.notify(request, f"{text} The request is stored; retrying.")
