"""What the bot does: carries out the requests in the inbox, follows runs, asks what the watcher proposes.

Every look (`Worker.follow`, `Worker.move`) goes through all that is open and takes each thing one step further. What
fails is tried again later, less and less often; what was done is written down at once, and doing it twice is the
same as doing it once, so that a restart goes on where the last process stopped.
"""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Literal, TypeAlias

from evernear.errors import ConflictError, EvernearError, SettingsError, SlackError
from evernear.kubeflow.runs import Run, State
from evernear.release.registry import Cause, Champion, Registry
from evernear.reporting.notify import Outcome, load_confusion_matrix, load_outcome, load_rules
from evernear.run_record import RunRecord
from evernear.settings import Settings
from evernear.store import Store
from evernear.triggers import audit
from evernear.triggers.parameters import combine, from_settings, from_words, split_words
from evernear.triggers.proposals import Proposal, Proposals
from evernear.triggers.slack import messages
from evernear.triggers.slack.access import Access
from evernear.triggers.slack.inbox import TEXT_MAX, Inbox, Person, Request
from evernear.triggers.slack.web import Closed, Message, RateLimited, Web

if TYPE_CHECKING:
    from evernear.kubeflow.client import KfpRuns

Clock: TypeAlias = Callable[[], datetime]
WATCHER = Person(id="", name="the watcher")
BACKOFF_S, BACKOFF_MAX_S = 5.0, 300.0
OUTCOME_WITHIN = timedelta(minutes=1)
"""A run that succeeded has its outcome in the store; a store may take a moment to show it."""
GIVEN_UP_AFTER = 300
"""Failures in a row; with `BACKOFF_MAX_S` between them about a day."""
FOLLOWED_FOR = timedelta(days=1)
"""Runs that the watcher started by itself longer ago are no news."""
_PIPELINES = {"promote": "promote", "roll_back": "rollback"}
_ACTIONS = {"retrain": "start", "promote": "promote", "roll_back": "roll_back"}
_CHANGED = "The champion has changed since that button was shown; /evernear champion tells what serves."
_log = logging.getLogger(__name__)


class Worker:
    """One bot's worker. `follow` and `move` may run in two threads; neither raises."""

    def __init__(
        self, settings: Settings, store: Store, runs: "KfpRuns", web: Web, access: Access, clock: Clock
    ) -> None:
        self._settings = settings
        self._slack = settings.slack
        self._store = store
        self._runs = runs
        self._web = web
        self._access = access
        self._clock = clock
        self._registry = Registry(store)
        self._inbox = Inbox(store)
        self._proposals = Proposals(store)
        self._retries = _Retries(clock)
        self._shown: dict[str, tuple[Message, datetime]] = {}
        self._tidied = clock()

    def follow(self) -> None:
        """Take everything but promotions and rollbacks one step further."""
        self._attempt("proposals", self._look_at_proposals)
        self._attempt("inbox", lambda: self._work_off(moves=False))
        if self._clock() - self._tidied > timedelta(hours=1):
            self._tidied = self._clock()
            self._attempt("tidy", lambda: self._inbox.tidy(self._clock()))

    def move(self) -> None:
        """Carry out promotions and rollbacks; one may take as long as a rollout."""
        self._attempt("moves", lambda: self._work_off(moves=True))

    def _work_off(self, moves: bool) -> None:
        for request in self._inbox.open():
            if self._is_done_here(request) is moves:
                self._attempt(request.id, lambda request=request: self._take_further(request))

    def _attempt(self, name: str, work: Callable[[], None]) -> None:
        """Do ``work`` if its time has come; what fails is put off, and no fault stops the rest."""
        if not self._retries.is_due(name):
            return
        try:
            work()
        except ConflictError:
            pass  # a click came in between; the next look sees it
        except RateLimited as error:
            _log.warning("%s: %s Trying again in %.0f s.", name, error, error.retry_after_s)
            self._retries.put_off(name, error.retry_after_s)
        except EvernearError as error:
            _log.warning("%s: %s Trying again later.", name, error)
            self._retries.put_off(name)
        except Exception:  # a fault of ours with one request must not stop the others
            _log.exception("%s: evernear itself failed; trying again later.", name)
            self._retries.put_off(name)
        else:
            self._retries.forget(name)

    def _take_further(self, request: Request) -> None:
        try:
            self._advance(request)
        except (ConflictError, RateLimited):
            raise
        except Exception as error:
            self._tell_fault(request.id, error)
            raise

    def _advance(self, request: Request) -> None:
        match request.kind, request.state:
            case "retrain", "new":
                self._ask(request)
            case "retrain", "asked":
                self._expire(request)
            case "retrain", "accepted":
                self._start(request)
            case _, "running":
                self._follow(request)
            case "retrain", "declined" | "expired":
                self._web.edit(request.message, messages.answered(request))
                self._close(request, "done")
            case "stop", _:
                self._stop(request)
            case "help", _:
                self._web.post(request.channel, messages.HELP, request.thread)
                self._close(request, "done")
            case "promote" | "roll_back", _ if self._is_done_here(request):
                self._move(request)
            case "promote" | "roll_back", _:
                self._start_move(request)
            case _:
                raise AssertionError(f"a {request.kind} cannot be {request.state}")

    # --- a run: asked for, started, followed ---------------------------------------------------------------------

    def _ask(self, request: Request) -> None:
        known = self._runs.parameters(request.pipeline)
        try:
            if len(request.text) > TEXT_MAX:
                said = f"That is more than {TEXT_MAX} characters; put the settings into the pipeline instead."
                raise SettingsError(said)
            parameters = from_words(split_words(request.text), known, self._slack.parameters)
        except SettingsError as error:
            self._web.whisper(request.channel, request.asked_by.id, messages.line(str(error)))
            self._close(request, "failed")
            return
        newest = self._runs.list(request.pipeline, limit=20)
        last = next((run for run in newest if run.state is State.SUCCEEDED), None)
        busy = [run for run in newest if not run.state.is_final]
        defaults = combine({each.name: each.default for each in known}, from_settings(self._settings, known))
        until = request.created + timedelta(seconds=self._slack.prompt_timeout_s)
        asked = messages.question(request, parameters, defaults, last, busy, until)
        try:
            message = self._web.post(request.channel, asked)
        except Closed:
            sentence = "I cannot write to that channel; invite me with /invite @evernear and ask again."
            self._web.post(request.asked_by.id, messages.line(sentence))
            self._close(request, "failed")
            return
        self._inbox.change(request, state="asked", message=message, parameters=parameters)

    def _expire(self, request: Request) -> None:
        if self._clock() - request.created > timedelta(seconds=self._slack.prompt_timeout_s):
            self._inbox.change(request, state="expired")

    def _start(self, request: Request) -> None:
        if not request.message:  # nobody was asked in a message that could tell how it goes on
            message = self._web.post(request.channel, messages.starting(request))
            request = self._inbox.change(request, message=message)
        try:
            ours = from_settings(self._settings, self._runs.parameters(request.pipeline))
            arguments = combine(ours, {"started_by": request.started_by}, request.parameters)
            run = self._runs.start(request.pipeline, arguments, request.key, self._store)
        except SettingsError as error:
            self._not_started(request, str(error))
            return
        self._audit(request, _ACTIONS[request.kind], "done", run=run.id, release=request.release)
        self._note_in_proposal(request, run)  # first, as an accepted request is tried again and a running one is not
        request = self._inbox.change(request, state="running", run=run.id)
        self._web.edit(request.message, self._headline(request, run, None))

    def _not_started(self, request: Request, fault: str) -> None:
        self._web.edit(request.message, messages.not_started(request, fault))
        self._audit(request, _ACTIONS[request.kind], "failed", release=request.release, detail=fault)
        self._close(request, "failed")

    def _follow(self, request: Request) -> None:
        run = self._runs.show(request.run)
        outcome = load_outcome(self._store, run.id) if run.state.is_final else None
        is_fresh = run.ended is not None and self._clock() - run.ended < OUTCOME_WITHIN
        if run.state is State.SUCCEEDED and outcome is None and is_fresh:
            return
        channel, _, thread = request.message.partition("/")
        if run.steps and not request.progress:
            place = self._web.post(channel, messages.progress(run), thread)
            request = self._inbox.change(request, progress=place)
        elif request.progress:
            self._show(request.progress, messages.progress(run), at_once=run.state.is_final)
        if run.state.is_final:
            self._tell_verdict(request, run, outcome)
        else:
            self._show(request.message, self._headline(request, run, None))

    def _tell_verdict(self, request: Request, run: Run, outcome: Outcome | None) -> None:
        channel, _, thread = request.message.partition("/")
        if not request.verdict:
            told = messages.verdict(
                request,
                run,
                outcome,
                load_rules(self._store, run.id),
                self._registry.champion(),
                can_promote=self._access.is_open_to_anybody("promote"),
                can_roll_back=self._access.is_open_to_anybody("roll_back"),
            )
            request = self._inbox.change(request, verdict=self._web.post(channel, told, thread))
        self._show(request.message, self._headline(request, run, outcome), at_once=True)
        picture = load_confusion_matrix(self._store, run.id)
        if picture:
            title = "Confusion matrix of the candidate"
            alt_text = "Confusion matrix: labels by answers, mistakes in red"
            self._web.upload(request.message, picture, "confusion-matrix.png", title, alt_text)
        is_undone = request.kind != "retrain" and run.state is not State.SUCCEEDED
        self._close(request, "failed" if is_undone else "done")

    def _headline(self, request: Request, run: Run, outcome: Outcome | None) -> Message:
        return messages.headline(request, run, outcome, self._access.is_open_to_anybody("stop"))

    def _show(self, place: str, message: Message, at_once: bool = False) -> None:
        """Edit ``place``, if that changes anything and it was not edited just now."""
        shown = self._shown.get(place)
        if shown and shown[0] == message:
            return
        if shown and not at_once and self._clock() - shown[1] < timedelta(seconds=self._slack.update_interval_s):
            return
        self._web.edit(place, message)
        self._shown[place] = (message, self._clock())

    # --- what the watcher proposes -------------------------------------------------------------------------------

    def _look_at_proposals(self) -> None:
        """Ask what is open, once; follow what was accepted; say of the others what became of them."""
        if not self._slack.channel:
            return
        for proposal in self._proposals.list():
            # By another name than its request's, whose failures a look that went well would forget.
            self._attempt(f"proposal {proposal.id}", lambda proposal=proposal: self._look_at(proposal))

    def _look_at(self, proposal: Proposal) -> None:
        match proposal.state:
            case "open" if proposal.message is None:
                place = self._web.post(self._slack.channel, messages.proposal(proposal))
                self._proposals.change(proposal, message=place)
            case "accepted" if proposal.run is None or self._is_news(proposal):
                self.take_up(proposal)
            case "declined" | "expired" if proposal.message and not proposal.told:
                self._web.edit(proposal.message, messages.proposal(proposal, open_=False))
                self._proposals.change(proposal, told=True)
            case _:
                pass

    def _is_news(self, proposal: Proposal) -> bool:
        return self._clock() - (proposal.answered or proposal.created) < FOLLOWED_FOR

    def take_up(self, proposal: Proposal) -> None:
        """Make an accepted proposal a request, which starts its run (or finds it started) and follows it."""
        if self._inbox.find(proposal.id) is None:
            self._inbox.add(request_of(proposal, self._slack.channel))

    def _note_in_proposal(self, request: Request, run: Run) -> None:
        proposal = self._proposals.find(request.id)
        if proposal is not None and proposal.run is None:
            self._proposals.change(proposal, run=run.id)

    def _withdraw_proposal(self, request: Request) -> None:
        """Let nobody find an accepted proposal without a run, and start it, when the request is long forgotten."""
        proposal = self._proposals.find(request.id)
        if proposal is not None and proposal.run is None:
            self._proposals.change(proposal, state="expired", told=True)

    # --- a run is stopped ----------------------------------------------------------------------------------------

    def _stop(self, request: Request) -> None:
        if request.run:
            found = [self._runs.show(request.run)]
        else:
            found = [run for run in self._runs.list(limit=50) if run.id.startswith(request.text)]
        if len(found) != 1:
            what = "No run's id begins" if not found else "More than one run's id begins"
            sentence = f"{what} with {request.text!r}; /evernear runs lists them."
            self._web.whisper(request.channel, request.asked_by.id, messages.line(sentence))
            self._close(request, "failed")
            return
        run = found[0]
        if not run.state.is_final:
            RunRecord(self._store, run.id).save_stop(str(request.by), self._clock())
            self._runs.stop(run.id)
            self._audit(request, "stop", "done", run=run.id)
        self._web.post(request.channel, messages.stopping(request, run), request.thread)
        self._close(request, "done", run=run.id)

    # --- another release serves ----------------------------------------------------------------------------------

    def _is_done_here(self, request: Request) -> bool:
        """Whether this process moves the champion. In a cluster a pipeline does: the bot has no rights there."""
        return request.kind in ("promote", "roll_back") and self._settings.target != "kubernetes"

    def _start_move(self, request: Request) -> None:
        """Let a pipeline promote or roll back, and follow that run."""
        if not request.parameters:
            champion = self._registry.champion()
            if (champion.promotion.number if champion else 0) != request.move:
                self._web.post(request.channel, messages.not_moved(request, _CHANGED), request.thread)
                self._audit(request, request.kind, "failed", release=request.release, detail=_CHANGED)
                self._close(request, "failed")
                return
            wanted = {"release": request.release, "reason": _why(request)}
            request = self._inbox.change(request, pipeline=_PIPELINES[request.kind], parameters=wanted)
        self._start(request)

    def _move(self, request: Request) -> None:
        before = self._registry.champion()  # a store that cannot be reached fails here, and is tried again
        number = before.promotion.number if before else 0
        if number == request.move:
            fault = self._try_move(request)
        elif before and _is_from(request, before):
            fault = ""  # the last process did it and could not say so any more
        else:
            fault = _CHANGED
        after = self._registry.champion()
        told = (
            messages.not_moved(request, fault) if fault or after is None else messages.moved(request, after.promotion)
        )
        result = "failed" if fault else "done"
        self._audit(request, request.kind, result, release=request.release, detail=fault)
        self._web.post(request.channel, told, request.thread)
        self._close(request, result)

    def _try_move(self, request: Request) -> str:
        """Promote or roll back; the sentence of what went wrong, or an empty one."""
        cause = Cause(by=str(request.by), why=_why(request))
        try:  # here, as the bot's image has nothing that serves: there a pipeline does this
            from evernear.deployment import promote, roll_back
        except ModuleNotFoundError as error:
            return f"{error.name} is not installed where I run; `evernear registry` does it where a server is."
        try:
            if request.kind == "promote":
                promote(request.release, self._settings, force=True, cause=cause)
            else:
                roll_back(self._settings, cause=cause, expected=request.release)
        except EvernearError as error:
            _log.warning("%s: %s", request.id, error)
            return str(error)
        return ""

    # --- what all of them share ----------------------------------------------------------------------------------

    def _close(self, request: Request, state: Literal["done", "failed"], **fields: object) -> None:
        held = self._inbox.find(request.id)
        if held is not None and not held.is_final:
            if state == "failed":
                self._withdraw_proposal(request)
            self._inbox.change(held, state=state, **fields)
        for place in (request.message, request.progress):
            self._shown.pop(place, None)

    def _tell_fault(self, request_id: str, error: Exception) -> None:
        """Say once that something does not answer and that the request is kept; give up what is not to come late."""
        request, failures = self._inbox.find(request_id), self._retries.failures(request_id)
        if request is None or request.is_final:
            return
        waited = self._clock() - (request.answered or request.created)
        fault = messages.sentence_of(error)
        is_late = request.state in ("new", "accepted") and waited > timedelta(seconds=self._slack.start_timeout_s)
        if isinstance(error, Closed) or failures >= GIVEN_UP_AFTER:
            _log.error("%s: %s Given up.", request_id, fault)
            self._close(request, "failed")
        elif is_late:
            self._give_up(request, f"{fault} Given up after {messages.duration(waited)}; ask again.")
        elif failures == 0 and not isinstance(error, SlackError) and request.state in ("new", "accepted", "running"):
            self._tell_wait(request, fault)  # of a question without a yes nobody waits for more

    def _give_up(self, request: Request, fault: str) -> None:
        if request.message:
            self._not_started(request, fault)
        else:
            self._web.whisper(request.channel, request.by.id, messages.line(fault))
            self._close(request, "failed")

    def _tell_wait(self, request: Request, fault: str) -> None:
        channel, _, thread = request.message.partition("/")
        if request.state == "running":
            lost = f"I lost sight of the run, which goes on without me: {fault} I am trying again."
            self._web.post(channel, messages.line(lost), thread)
        elif request.message:
            self._web.edit(request.message, messages.starting(request, fault))
        else:
            kept = messages.line(f"{fault} Your request is kept; I am trying again.")
            self._web.whisper(request.channel, request.by.id, kept)

    def _audit(
        self,
        request: Request,
        what: str,
        result: Literal["done", "failed"],
        run: str = "",
        release: str = "",
        detail: str = "",
    ) -> None:
        line = audit.Line(
            request=request.id,
            at=request.answered or request.created,
            who=str(request.by),
            what=what,
            result=result,
            where=request.channel,
            run=run,
            release=release,
            detail=detail,
        )
        audit.write(self._store, line)


def request_of(proposal: Proposal, channel: str) -> Request:
    """The request that an accepted proposal comes to; they share the id, and so does the run's key."""
    asked_in = (proposal.message or "").partition("/")[0]
    return Request(
        id=proposal.id,
        kind="retrain",
        state="accepted",
        created=proposal.created,
        asked_by=WATCHER,
        channel=asked_in or channel,
        pipeline=proposal.pipeline,
        answered_by=Person(id="", name=proposal.answered_by) if proposal.answered_by else None,
        answered=proposal.answered,
        message=proposal.message or "",
    )


def _why(request: Request) -> str:
    return f"asked for in Slack, request {request.id}"


def _is_from(request: Request, champion: Champion) -> bool:
    return champion.promotion.number == request.move + 1 and request.id in champion.promotion.why


class _Retries:
    """When what failed is tried again. Kept in memory: after a restart everything is due."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failed: dict[str, tuple[int, datetime]] = {}

    def is_due(self, name: str) -> bool:
        return name not in self._failed or self._clock() >= self._failed[name][1]

    def failures(self, name: str) -> int:
        """How often it failed in a row."""
        return self._failed[name][0] if name in self._failed else 0

    def put_off(self, name: str, wait_s: float | None = None) -> None:
        """Wait ``wait_s``, or twice as long as the last time."""
        failures = self.failures(name) + (wait_s is None)
        if wait_s is None:
            wait_s = min(BACKOFF_MAX_S, BACKOFF_S * 2 ** min(failures - 1, 20))
        self._failed[name] = (failures, self._clock() + timedelta(seconds=wait_s))

    def forget(self, name: str) -> None:
        self._failed.pop(name, None)
