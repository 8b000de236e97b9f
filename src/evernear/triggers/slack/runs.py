"""Runs: start accepted requests, follow each run in a message and its thread, post verdicts, and
stop runs."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from slack_sdk.models.blocks import ButtonElement

from evernear.common.audit import request_id
from evernear.common.output import printable, quantity
from evernear.common.run_record import RunRecord
from evernear.errors import SettingsError
from evernear.evaluation.headline import headline
from evernear.evaluation.verdict import Rule
from evernear.kubeflow.runs import KfpStep, Run, State, from_settings, outcome_of, to_start
from evernear.release.promotions import Champion
from evernear.reporting.notify import CONFUSION_MATRIX, RunOutcome, load_rules
from evernear.triggers.requests import Request
from evernear.triggers.slack.blocks import (
    EMOJI,
    TEXT_MAX,
    Message,
    actions,
    code,
    context,
    cut,
    danger_button,
    duration,
    escape,
    header,
    join_lines,
    link_button,
    mention,
    paragraph,
    section,
)
from evernear.triggers.slack.promotions import promote_button, roll_back_buttons
from evernear.triggers.slack.services import Call, Services

STOP = "run.stop"
STEPS_MAX = 40
OUTCOME_GRACE = timedelta(minutes=1)
"""Time after the end of a successful run during which its outcome may not be visible in the store
yet."""
UPDATE_INTERVAL = timedelta(seconds=15)
"""Shortest time between edits of a message, below Slack's limit for all runs together."""
_OUTCOME_EMOJI = {
    "promoted": ":tada:",
    "held": ":no_entry:",
    "rolled back": ":rewind:",
    "predicted": ":page_facing_up:",
    "stopped": ":octagonal_sign:",
    "failed": ":x:",
}
_AUDITED_AS = {"run": "start", "promote": "promote", "roll_back": "roll_back"}


def request_stop(call: Call) -> None:
    run_id = call.text[:100]
    call.record("stop", request_id("stop", run_id), run=run_id)


class RunTracker:
    """Starts and follows runs, and limits how often a message is edited."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._shown: dict[str, tuple[Message, datetime]] = {}
        """The last content of each edited message and the time of the edit, keyed by address."""

    def start(self, request: Request) -> None:
        """The request's key is passed to the pipeline server, so that a repeated start finds the
        first run."""
        services = self._services
        request = self._with_message(request)
        try:
            known = services.runs.parameters(request.pipeline)
            ours = from_settings(services.settings, known)
            arguments = to_start(request.pipeline, known, request.started_by, ours, request.parameters)
            run = services.runs.start(request.pipeline, arguments, request.key, services.store)
        except SettingsError as error:
            self.give_up(request, str(error))
            return
        services.audit(request, _AUDITED_AS[request.kind], "done", run=run.id)
        request = services.requests.change(request, state="started", run=run.id)
        services.slack.edit(request.message, self._status(request, run, None))

    def give_up(self, request: Request, error: str) -> None:
        self._services.slack.edit(request.message, not_started(request, error))
        self._services.audit(request, _AUDITED_AS[request.kind], "failed", detail=error)
        self._services.finish(request, "failed")

    def follow(self, request: Request) -> None:
        services = self._services
        run = services.runs.show(request.run)
        outcome = outcome_of(services.store, run)
        ended_just_now = run.ended is not None and services.clock() - run.ended < OUTCOME_GRACE
        if run.state is State.SUCCEEDED and outcome is None and ended_just_now:
            return
        request = self._with_message(request)
        channel, _, thread = request.message.partition("/")
        if request.progress:
            self._edit(request.progress, progress(run), final=run.state.is_final)
        elif run.steps:
            address = services.slack.post(channel, progress(run), thread)
            request = services.requests.change(request, progress=address)
        if run.state.is_final:
            self._report(request, run, outcome)
        else:
            self._edit(request.message, self._status(request, run, None))

    def stop(self, request: Request) -> None:
        services = self._services
        if request.run:
            matches = [services.runs.show(request.run)]
        else:
            matches = [run for run in services.runs.list(limit=50) if run.id.startswith(request.text)]
        if len(matches) != 1:
            subject = "More than one run's id begins" if matches else "No run's id begins"
            services.notify(request, f"{subject} with {request.text!r}; /evernear runs lists them.")
            services.finish(request, "failed")
            return
        (run,) = matches
        if not run.state.is_final:
            RunRecord(services.store, run.id).save_stop(str(request.by), services.clock())
            services.runs.stop(run.id)
            services.audit(request, "stop", "done", run=run.id)
        services.slack.post(request.channel, stopping(request, run), request.thread)
        services.finish(request, "ended", run=run.id)

    def _report(self, request: Request, run: Run, outcome: RunOutcome | None) -> None:
        services = self._services
        channel, _, thread = request.message.partition("/")
        if not request.verdict:
            current, access = services.registry.champion(), services.access
            buttons: list[ButtonElement] = []
            if outcome and outcome.state == "held" and outcome.candidate and access.is_granted("promote"):
                buttons.append(promote_button(outcome.candidate, current))
            is_live = outcome and outcome.state == "promoted" and current and current.version == outcome.release
            if is_live and current and access.is_granted("promote"):
                buttons += roll_back_buttons(current)
            message = verdict(request, run, outcome, load_rules(services.store, run.id), current, buttons)
            request = services.requests.change(request, verdict=services.slack.post(channel, message, thread))
        self._edit(request.message, self._status(request, run, outcome), final=True)
        picture = RunRecord(services.store, run.id).get(CONFUSION_MATRIX)
        if picture:
            title = "Confusion matrix of the candidate"
            alt_text = "Confusion matrix: true labels by predicted labels, mistakes in red"
            services.slack.upload(request.message, picture, "confusion-matrix.png", title, alt_text)
        services.finish(request, "failed" if run.state is State.FAILED else "ended")

    def _with_message(self, request: Request) -> Request:
        """Post the status message of a request that was accepted without a prompt."""
        if request.message:
            return request
        channel = request.channel or self._services.settings.slack.channel
        address = self._services.slack.post(channel, starting(request))
        return self._services.requests.change(request, message=address, channel=channel)

    def _status(self, request: Request, run: Run, outcome: RunOutcome | None) -> Message:
        return status(request, run, outcome, can_stop=self._services.access.is_granted("start"))

    def _edit(self, address: str, message: Message, final: bool = False) -> None:
        previous, edited = self._shown.get(address, (None, None))
        is_early = edited and not final and self._services.clock() - edited < UPDATE_INTERVAL
        if previous == message or is_early:
            return
        self._services.slack.edit(address, message)
        self._shown[address] = (message, self._services.clock())
        if final:
            del self._shown[address]


def starting(request: Request, error: str = "") -> Message:
    """``error`` is the reason why the last attempt failed."""
    blocks = [section(f":hourglass_flowing_sand: *Starting.* {_people(request)}")]
    if error:
        blocks.append(context(f":warning: {escape(error)} The request is stored; retrying."))
    return Message(text="Starting a run.", blocks=tuple(blocks))


def not_started(request: Request, error: str) -> Message:
    text = f":x: *Not started.* {escape(error)}"
    return Message(text=f"Not started: {escape(error)}", blocks=(section(text), context(_people(request))))


def status(request: Request, run: Run, outcome: RunOutcome | None, can_stop: bool) -> Message:
    """The summary of a run, which is the message in the channel above the thread."""
    if run.state.is_final:
        emoji, result = _result(run, outcome)
        text = f"{emoji} *{escape(result)}* after {duration(_age(run))}. The thread has the verdict."
    else:
        active = [escape(step.name) for step in run.steps if step.state is State.RUNNING]
        text = f"{EMOJI[run.state]} *{run.state.capitalize()}*" + (f": {', '.join(active)}" if active else "")
    buttons = link_button(run.url, run.id)
    if can_stop and not run.state.is_final:
        buttons.append(danger_button("Stop", STOP, run.id, "Stop this run?", f"{run.name} ends without a release."))
    blocks = [
        section(f"{text}\n{escape(run.name)}, {code(run.id)}"),
        *actions(*buttons),
        context(_people(request)),
    ]
    return Message(text=f"{cut(escape(run.name), 200)}: {run.state}", blocks=tuple(blocks))


def progress(run: Run) -> Message:
    lines = [_step(step) for step in run.steps[-STEPS_MAX:]] or ["No step has started yet."]
    return Message(text=f"{quantity(len(run.steps), 'step')} so far", blocks=(section(join_lines(lines)),))


def verdict(
    request: Request,
    run: Run,
    outcome: RunOutcome | None,
    rules: Sequence[Rule],
    current: Champion | None,
    buttons: Sequence[ButtonElement],
) -> Message:
    emoji, result = _result(run, outcome)
    lines = [_live(outcome, current), *(f"• {escape(reason)}" for reason in _reasons(run, outcome))]
    blocks = [header(f"{emoji} {result}"), section(join_lines(lines))]
    if rules:
        blocks.append(section(_table(rules)))
    if outcome and outcome.caution:
        blocks.append(section(f":warning: {escape(outcome.caution)}"))
    if outcome and (measured := headline(outcome.metrics)):
        blocks.append(context(escape(f"{measured}{_label_right(outcome.metrics)}")))
    blocks += actions(*buttons, *link_button(run.url, run.id))
    blocks.append(context(f"{mention(request.by)} · run {code(run.id)} · {escape(run.pipeline_version)}"))
    if outcome:
        blocks.append(context(f"Run page: artifact page of notify, or {code(f'evernear report {run.id}')}"))
    return Message(text=f"{escape(result)} {mention(request.by)}", blocks=tuple(blocks))


def stopping(request: Request, run: Run) -> Message:
    if run.state.is_final:
        text = f"{escape(run.name)} had already ended: {run.state}."
    else:
        text = f":octagonal_sign: {mention(request.by)} stops {escape(run.name)}, {code(run.id)}."
    return paragraph(text)


def _result(run: Run, outcome: RunOutcome | None) -> tuple[str, str]:
    if run.state is State.CANCELED and (outcome is None or outcome.state == "failed"):
        return EMOJI[State.CANCELED], "Stopped"
    if outcome is not None:
        release = f": {outcome.release}" if outcome.state in ("promoted", "rolled back") else ""
        return _OUTCOME_EMOJI[outcome.state], outcome.state.capitalize() + release
    return (":grey_question:", "Ended without a verdict") if run.state is State.SUCCEEDED else (":x:", "Failed")


def _reasons(run: Run, outcome: RunOutcome | None) -> Sequence[str]:
    reasons = outcome.reasons if outcome else ()
    if outcome and outcome.step:
        return [f"{outcome.step}: {' '.join(reasons)}"]
    failed = [f"{step.name}: {step.error or 'failed'}" for step in run.steps if step.state is State.FAILED]
    return reasons or failed or ([run.error] if run.error else [])


def _live(outcome: RunOutcome | None, current: Champion | None) -> str:
    if current is None:
        return "No release is live yet."
    is_new = outcome is not None and outcome.release == current.version
    return f"*{escape(current.version)}* {'is live' if is_new else 'is still live'}."


def _step(step: KfpStep) -> str:
    time = f"  {duration(step.ended - step.started)}" if step.started and step.ended else ""
    error = f"\n      {escape(cut(step.error, 300))}" if step.error else ""
    return f"{EMOJI[step.state]} {escape(step.name)}{time}{error}"


def _table(rules: Sequence[Rule]) -> str:
    rows = [("", "candidate", "champion", "bound", "")]
    rows += [
        (
            printable(rule.name.replace("_", " ").replace("`", "'")),
            _number(rule.candidate),
            _number(rule.champion),
            _number(rule.bound),
            ("" if rule.passed else "broken") if rule.could_fail else "too few to tell",
        )
        for rule in rules
    ]
    name_width, *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for name, *numbers, remark in rows:
        aligned = [number.rjust(width) for number, width in zip(numbers, widths, strict=True)]
        lines.append("  ".join([name.ljust(name_width), *aligned, remark]).rstrip())
    return cut("```\n" + "\n".join(map(escape, lines)), TEXT_MAX - 200) + "\n```"


def _label_right(metrics: Mapping[str, float]) -> str:
    """The figure with which the gate compares candidate and champion."""
    if "label_right" not in metrics or "champion_label_right" not in metrics:
        return ""
    return f"; label right {metrics['label_right']:.2%}, the champion's {metrics['champion_label_right']:.2%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _age(run: Run) -> timedelta:
    return (run.ended or run.created) - run.created


def _people(request: Request) -> str:
    if request.answered_by == request.asked_by:
        return f"Requested and started by {mention(request.by)}"
    started = f", started by {mention(request.answered_by)}" if request.answered_by else ""
    return f"Requested by {mention(request.asked_by)}{started}"
