"""Everything that the bot shows, as Block Kit: functions from what is known to a `Message`, which ask nobody."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Any

from evernear.errors import EvernearError
from evernear.evaluation.verdict import Rule
from evernear.kubeflow.runs import Run, State, Step
from evernear.output import printable
from evernear.release.registry import Champion, Promotion, Record
from evernear.reporting.notify import Outcome
from evernear.settings import DataSettings
from evernear.triggers.proposals import Proposal
from evernear.triggers.slack.inbox import Person, Request
from evernear.triggers.slack.web import Block, Message

TEXT_MAX = 3000
"""Characters of a section: Slack's own limit, as are 150 of a header."""
HEADER_MAX = 150
STEPS_MAX = 40

START, DECLINE = "request.start", "request.decline"
ACCEPT, NOT_NOW = "proposal.accept", "proposal.decline"
STOP = "run.stop"
PROMOTE, ROLL_BACK = "release.promote", "release.roll_back"
LINK = "link"

_SIGNS = {
    State.PENDING: ":white_circle:",
    State.RUNNING: ":hourglass_flowing_sand:",
    State.SUCCEEDED: ":white_check_mark:",
    State.SKIPPED: ":heavy_minus_sign:",
    State.FAILED: ":x:",
    State.CANCELING: ":octagonal_sign:",
    State.CANCELED: ":octagonal_sign:",
    State.PAUSED: ":double_vertical_bar:",
}
_OUTCOME_SIGNS = {
    "promoted": ":tada:",
    "held": ":no_entry:",
    "rolled back": ":rewind:",
    "stopped": ":octagonal_sign:",
    "failed": ":x:",
}
_PIPELINES = {"continuous-training": "train", "reindex": "index the gallery"}

HELP = Message(
    text="What I can do: /retrain, and /evernear status, runs, champion, rollback, stop, schedule.",
    blocks=(
        {
            "type": "section",
            "text": {
                "type": "mrkdwn",
                "text": "I start training runs, follow them and tell what became of them.\n"
                "• `/retrain [name=value ...]` asks before it starts one, e.g. `/retrain train.epochs=8`\n"
                "• `/evernear status` what serves, what runs, what waits for an answer\n"
                "• `/evernear runs` the newest runs\n"
                "• `/evernear champion` the release that serves, and how it came to\n"
                "• `/evernear rollback` back to the release before, after a question\n"
                "• `/evernear stop RUN` ends a run; the beginning of its id will do\n"
                "• `/evernear schedule [start|stop]` the watcher, which proposes runs by itself",
            },
        },
    ),
)


def line(text: str) -> Message:
    """A sentence; ``text`` is plain, whatever stands in it."""
    return Message(text=escape(text), blocks=(_section(escape(text)),))


def sentence_of(error: Exception) -> str:
    """What went wrong; of a fault of ours only its kind, as nobody wrote its text for a channel."""
    if isinstance(error, EvernearError):
        return str(error)
    return f"I failed at it myself ({type(error).__name__}); my log tells more."


def question(
    request: Request,
    parameters: Mapping[str, Any],
    defaults: Mapping[str, Any],
    last: Run | None,
    busy: Sequence[Run],
    until: datetime,
) -> Message:
    """Ask whether to start what ``request`` wants: what would run, on what data, how long the last one took."""
    changed = [_code(f"{name} = {_short(value)}") for name, value in changes(parameters, defaults)]
    source = parameters.get("source") or defaults.get("source") or DataSettings().source
    fields = [
        f"*Pipeline*\n{escape(request.pipeline)}, newest published version",
        f"*Data*\n{escape(str(source))}",
        "*Changed settings*\n" + (", ".join(changed) or "none"),
        "*The last one*\n" + _took(last),
    ]
    blocks = [
        _section(f"*Train again?* {mention(request.asked_by)} asks for it."),
        {"type": "section", "fields": [_mrkdwn(_cut(text, 2000)) for text in fields]},
        *([_section(f":warning: {_going_on(busy)}")] if busy else []),
        _actions(
            _button("Start training", START, request.id, style="primary"), _button("Not now", DECLINE, request.id)
        ),
        _context(f"Nothing runs before somebody says so. This question expires {date(until)}."),
    ]
    who = escape(request.asked_by.name) or "Somebody"
    return Message(text=f"Train again? {who} asks for it.", blocks=tuple(blocks))


def answered(request: Request) -> Message:
    """What became of a question that was not answered with yes."""
    if request.state == "expired":
        text = f"*Not started.* Nobody answered {mention(request.asked_by)} in time; `/retrain` asks again."
    else:
        text = f"*Not started.* {mention(request.by)} said no."
    return Message(text="Not started.", blocks=(_section(text),))


def starting(request: Request, fault: str = "") -> Message:
    """A yes that has not reached the pipeline server yet."""
    blocks = [_section(f":hourglass_flowing_sand: *Starting.* {_who(request)}")]
    if fault:
        blocks.append(_context(f":warning: {escape(fault)} Your request is kept; I am trying again."))
    return Message(text="Starting a training run.", blocks=tuple(blocks))


def not_started(request: Request, fault: str) -> Message:
    """A yes that came to nothing."""
    text = f":x: *Not started.* {escape(fault)}"
    return Message(text=f"Not started: {escape(fault)}", blocks=(_section(text), _context(_who(request))))


def headline(request: Request, run: Run, outcome: Outcome | None, can_stop: bool) -> Message:
    """The run in a few words: the message in the channel, over the thread."""
    if run.state.is_final:
        sign, word = _ending(run, outcome)
        text = f"{sign} *{escape(word)}* after {duration(_age(run))}. The thread has the verdict."
    else:
        now = [escape(step.name) for step in run.steps if step.state is State.RUNNING]
        text = f"{_SIGNS[run.state]} *{run.state.capitalize()}*" + (f": {', '.join(now)}" if now else "")
    buttons = [_button("Open in Kubeflow", LINK, run.id, url=run.url)] if run.url.startswith("http") else []
    if can_stop and not run.state.is_final:
        confirm = _confirm("Stop this run?", f"{run.name} ends without a release.", "Stop it")
        buttons.append(_button("Stop", STOP, run.id, style="danger", confirm=confirm))
    blocks = [
        _section(f"{text}\n{escape(run.name)}, {_code(run.id)}"),
        *([_actions(*buttons)] if buttons else []),
        _context(_who(request)),
    ]
    return Message(text=f"{_cut(escape(run.name), 200)}: {run.state}", blocks=tuple(blocks))


def progress(run: Run) -> Message:
    """The run step by step."""
    shown = run.steps[-STEPS_MAX:]
    lines = [_step(step) for step in shown] or ["No step has started yet."]
    return Message(text=f"{len(run.steps)} steps so far", blocks=(_section(_joined(lines)),))


def verdict(
    request: Request,
    run: Run,
    outcome: Outcome | None,
    rules: Sequence[Rule],
    champion: Champion | None,
    can_promote: bool,
    can_roll_back: bool,
) -> Message:
    """What the run came to and why, with what can be done about it."""
    sign, word = _ending(run, outcome)
    reasons = outcome.reasons if outcome else ()
    if outcome and outcome.step:
        reasons = (f"{outcome.step}: {' '.join(reasons)}",)
    if not reasons:
        failed = [f"{step.name}: {step.error or 'failed'}" for step in run.steps if step.state is State.FAILED]
        reasons = tuple(failed) or ((run.error,) if run.error else ())
    blocks: list[Block] = [
        {"type": "header", "text": _plain(_cut(printable(f"{sign} {word}"), HEADER_MAX)) | {"emoji": True}},
        _section(_joined([_serves(outcome, champion), *(f"• {escape(reason)}" for reason in reasons)])),
    ]
    if rules:
        blocks.append(_section(_table(rules)))
    if outcome and "accuracy" in outcome.metrics:
        blocks.append(_context(_figures(outcome.metrics)))
    number = champion.promotion.number if champion else 0
    buttons: list[Block] = []
    if outcome and outcome.state == "held" and outcome.candidate and can_promote:
        asked = {"release": outcome.candidate, "move": number}
        confirm = _confirm(
            "Promote against the verdict?",
            f"{outcome.candidate} will serve although the gate held it. Your name goes into the history.",
            "Promote it",
        )
        buttons.append(_button("Promote anyway", PROMOTE, json.dumps(asked), style="danger", confirm=confirm))
    if outcome and outcome.state == "promoted" and champion and champion.version == outcome.release and can_roll_back:
        buttons += roll_back_button(champion)
    if run.url.startswith("http"):
        buttons.append(_button("Open in Kubeflow", LINK, run.id, url=run.url))
    if buttons:
        blocks.append(_actions(*buttons))
    blocks.append(_context(f"{mention(request.by)} · run {_code(run.id)} · {escape(run.pipeline_version)}"))
    return Message(text=f"{escape(word)} {mention(request.by)}", blocks=tuple(blocks))


def roll_back_button(champion: Champion) -> list[Block]:
    """The button that takes the champion's last move back; none where nothing came before it."""
    if champion.previous is None:
        return []
    asked = {"release": champion.version, "move": champion.promotion.number}
    text = f"{champion.previous} will serve again instead of {champion.version}."
    confirm = _confirm("Roll back?", text, "Roll back")
    return [_button("Roll back", ROLL_BACK, json.dumps(asked), style="danger", confirm=confirm)]


def proposal(asked: Proposal, open_: bool = True) -> Message:
    """What the watcher found, with a question; or what became of that."""
    what = _PIPELINES.get(asked.pipeline) or escape(asked.pipeline)
    reasons = [f"• {escape(reason)}" for reason in asked.reasons]
    blocks = [_section(_joined([f":eyes: *Time to {what}?*", *reasons]))]
    if open_:
        yes = "Train" if asked.pipeline == "continuous-training" else "Index"
        blocks.append(_actions(_button(yes, ACCEPT, asked.id, style="primary"), _button("Not now", NOT_NOW, asked.id)))
        blocks.append(_context(f"Found by the watcher {date(asked.created)}; nothing runs before somebody says so."))
    else:
        ending = "*Expired:* nobody answered in time." if asked.state == "expired" else f"*Not now*, says {_by(asked)}."
        blocks.append(_context(ending))
    return Message(text=f"Time to {what}? " + " ".join(map(escape, asked.reasons)), blocks=tuple(blocks))


def moved(request: Request, move: Promotion) -> Message:
    """That another release serves."""
    how = {"promote": "promoted", "roll_back": "rolled back"}[request.kind]
    text = f":white_check_mark: {mention(request.by)} {how}: *{escape(move.version)}* serves now" + (
        f", before it {escape(move.previous)}." if move.previous else "."
    )
    return Message(text=text, blocks=(_section(text),))


def not_moved(request: Request, fault: str) -> Message:
    """That the release was left where it is."""
    what = {"promote": "Not promoted", "roll_back": "Not rolled back"}[request.kind]
    text = f":x: {mention(request.by)} *{what}.* {escape(fault)}"
    return Message(text=text, blocks=(_section(text),))


def stopping(request: Request, run: Run) -> Message:
    """That a run was asked to end."""
    if run.state.is_final:
        text = f"{escape(run.name)} had ended already: {run.state}."
    else:
        text = f":octagonal_sign: {mention(request.by)} stops {escape(run.name)}, {_code(run.id)}."
    return Message(text=text, blocks=(_section(text),))


def runs(newest: Sequence[Run], now: datetime) -> Message:
    """The newest runs, a line each."""
    lines = [
        f"{_SIGNS[run.state]} {_code(run.id[:8])} {_link(run.url, run.name)}: {run.state}, "
        f"{duration((run.ended or now) - run.created)}, {date(run.created)}"
        for run in newest
    ]
    return Message(text="The newest runs", blocks=(_section(_joined(lines) or "There are no runs yet."),))


def champion(found: Champion | None, record: Record | None) -> Message:
    """The release that serves, and how it came to."""
    if found is None or record is None:
        return line("No release has been promoted yet.")
    move, accuracy = found.promotion, record.manifest.metrics.get("accuracy")
    by = escape(move.by) or "nobody named"
    text = f"*{escape(move.version)}* serves since {date(move.since)}: {escape(move.how)} by {by}."
    if move.why:
        text += f"\n_{escape(move.why)}_"
    facts = [
        f"*Accuracy*\n{accuracy:.2%}" if accuracy is not None else "*Accuracy*\nnot measured",
        f"*Classes*\n{len(record.manifest.labels)}",
        "*A rollback leads to*\n" + (escape(move.previous or "") or "nothing: it is the first"),
    ]
    blocks = (_section(text), {"type": "section", "fields": [_mrkdwn(fact) for fact in facts]})
    return Message(text=f"{escape(move.version)} serves", blocks=blocks)


def roll_back_question(found: Champion) -> Message:
    """Ask whether to roll back; only who asked sees it."""
    text = f"*{escape(found.version)}* serves. A rollback leads to *{escape(found.previous or '')}*."
    return Message(text=text, blocks=(_section(text), _actions(*roll_back_button(found))))


def status(serves: Champion | None, busy: Sequence[Run], waiting: int, watcher: str, now: datetime) -> Message:
    """What serves, what runs, what waits for an answer."""
    lines = [
        f"*Serves* {escape(serves.version)} since {date(serves.promotion.since)}" if serves else "*Serves* nothing yet",
        "*Runs* " + (", ".join(f"{_link(r.url, r.name)} for {duration(now - r.created)}" for r in busy) or "nothing"),
        f"*Waits for an answer* {waiting or 'nothing'}",
        f"*Watcher* {escape(watcher)}",
    ]
    return Message(text="Status", blocks=(_section("\n".join(lines)),))


def changes(parameters: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The parameters and settings that differ from the defaults; settings by their full name."""
    ours, theirs = _flat(parameters), _flat(defaults)
    return [(name.removeprefix("settings."), value) for name, value in ours.items() if theirs.get(name) != value]


def escape(text: str) -> str:
    """Text from outside for mrkdwn: on one line, and no link and no mention comes of it.

    Every text that Slack parses is built of our own words and of what went through this: of names, versions, sentences
    and ids of any origin. https://docs.slack.dev/messaging/formatting-message-text#escaping
    """
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def mention(person: Person) -> str:
    """A person's name as Slack shows it; not everybody has an id, such as the watcher."""
    return f"<@{person.id}>" if re.fullmatch(r"[UW]\w+", person.id, re.ASCII) else escape(person.name)


def date(at: datetime) -> str:
    """A time in the reader's own zone."""
    return f"<!date^{int(at.timestamp())}^{{date_short_pretty}} {{time}}|{at:%Y-%m-%d %H:%M} UTC>"


def duration(time: timedelta) -> str:
    """In the two units that matter."""
    seconds = max(0, int(time.total_seconds()))
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds % 60} s" if minutes else f"{seconds} s"


def _ending(run: Run, outcome: Outcome | None) -> tuple[str, str]:
    """Sign and words for a run that has ended."""
    if run.state is State.CANCELED and (outcome is None or outcome.state == "failed"):
        return _SIGNS[State.CANCELED], "Stopped"
    if outcome is not None:
        release = f": {outcome.release}" if outcome.state in ("promoted", "rolled back") else ""
        return _OUTCOME_SIGNS[outcome.state], outcome.state.capitalize() + release
    return (":grey_question:", "Ended without a verdict") if run.state is State.SUCCEEDED else (":x:", "Failed")


def _serves(outcome: Outcome | None, champion: Champion | None) -> str:
    if champion is None:
        return "No release serves yet."
    new = outcome is not None and outcome.release == champion.version
    return f"*{escape(champion.version)}* {'serves' if new else 'serves as before'}."


def _step(step: Step) -> str:
    time = f"  {duration(step.ended - step.started)}" if step.started and step.ended else ""
    error = f"\n      {escape(_cut(step.error, 300))}" if step.error else ""
    return f"{_SIGNS[step.state]} {escape(step.name)}{time}{error}"


def _table(rules: Sequence[Rule]) -> str:
    rows = [("", "candidate", "champion", "bound", "")]
    rows += [
        (
            printable(rule.name.replace("_", " ").replace("`", "'")),
            _number(rule.candidate),
            _number(rule.champion),
            _number(rule.bound),
            "" if rule.passed else "broken",
        )
        for rule in rules
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}  {row[4]}".rstrip()
        for row in rows
    ]
    return _cut("```\n" + "\n".join(map(escape, lines)), TEXT_MAX - 200) + "\n```"


def _figures(metrics: Mapping[str, float]) -> str:
    text = f"Accuracy {metrics['accuracy']:.2%}"
    if "accuracy_low" in metrics and "accuracy_high" in metrics:
        text += f" ({metrics['accuracy_low']:.2%} to {metrics['accuracy_high']:.2%})"
    images = f"{metrics['test_images']:,.0f} test images" if "test_images" in metrics else "test images"
    if "champion_accuracy" in metrics:
        return f"{text}, the champion's {metrics['champion_accuracy']:.2%}, on the same {images}"
    text += f" on {images}"
    return text


def _took(last: Run | None) -> str:
    if last is None or last.ended is None:
        return "there is none yet"
    return f"took {duration(last.ended - last.created)}, {date(last.created)}"


def _going_on(busy: Sequence[Run]) -> str:
    names = ", ".join(_link(run.url, run.name) for run in busy[:3])
    more = f" and {len(busy) - 3} more" if len(busy) > 3 else ""
    return f"{names}{more} {'runs' if len(busy) == 1 else 'run'} already."


def _age(run: Run) -> timedelta:
    return (run.ended or run.created) - run.created


def _who(request: Request) -> str:
    if request.answered_by == request.asked_by:
        return f"Asked for and started by {mention(request.by)}"
    started = f", started by {mention(request.answered_by)}" if request.answered_by else ""
    return f"Asked for by {mention(request.asked_by)}{started}"


def _by(asked: Proposal) -> str:
    return escape(asked.answered_by) or "somebody"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _short(value: Any) -> str:
    return _cut(value if isinstance(value, str) else json.dumps(value), 100)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 2] + " …"


def _joined(lines: Sequence[str]) -> str:
    """As many whole lines as a section holds; one that is cut could end within a link."""
    ends = accumulate(len(line) + 1 for line in lines)
    kept = [line for line, end in zip(lines, ends, strict=True) if end < TEXT_MAX]
    return "\n".join([*kept, "…"] if len(kept) < len(lines) else kept)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _link(url: str, name: str) -> str:
    if not url.startswith("http"):
        return escape(name)
    return f"<{escape(url).replace('|', '%7C')}|{escape(name).replace('|', '/')}>"


def _code(text: str) -> str:
    shown = escape(text).replace("`", "'")
    return f"`{shown}`"


def _plain(text: str) -> Block:
    """Text in which Slack parses nothing."""
    return {"type": "plain_text", "text": printable(text)}


def _mrkdwn(text: str) -> Block:
    return {"type": "mrkdwn", "text": text}


def _section(text: str) -> Block:
    return {"type": "section", "text": _mrkdwn(_cut(text, TEXT_MAX))}


def _context(text: str) -> Block:
    return {"type": "context", "elements": [_mrkdwn(_cut(text, TEXT_MAX))]}


def _actions(*buttons: Block) -> Block:
    return {"type": "actions", "elements": list(buttons)}


def _button(
    text: str, action: str, value: str, *, style: str = "", url: str = "", confirm: Block | None = None
) -> Block:
    button: Block = {
        "type": "button",
        "action_id": action,
        "text": _plain(text),
        "value": value,
    }
    return (
        button
        | ({"style": style} if style else {})
        | ({"url": url} if url else {})
        | ({"confirm": confirm} if confirm else {})
    )


def _confirm(title: str, text: str, yes: str) -> Block:
    return {
        "title": _plain(title),
        "text": _plain(_cut(printable(text), 300)),
        "confirm": _plain(yes),
        "deny": _plain("Cancel"),
        "style": "danger",
    }
