"""The slash commands. Each is one decorated function, with its name, help line and permission."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from evernear.common.audit import request_id
from evernear.errors import StoreError
from evernear.evaluation.headline import headline
from evernear.kubeflow.runs import Run
from evernear.release.promotions import Champion, Promotion
from evernear.release.records import Record
from evernear.release.registry import Registry
from evernear.settings.triggers import Right
from evernear.triggers.requests import TRAINING
from evernear.triggers.slack.blocks import (
    EMOJI,
    Message,
    actions,
    code,
    date,
    duration,
    escape,
    fields,
    join_lines,
    line,
    link,
    section,
)
from evernear.triggers.slack.promotions import roll_back_buttons
from evernear.triggers.slack.prompts import request_run
from evernear.triggers.slack.services import Call, RequestRefusedError, Services
from evernear.triggers.watch.schedule_state import ScheduleStore

RUN_ID_MIN_CHARACTERS = 4
Handler = Callable[[Call], Message | None]


@dataclass(frozen=True)
class Command:
    name: str
    help: str
    run: Handler
    usage: str
    permission: Right | None
    is_query: bool


COMMANDS: dict[str, Command] = {}


def command(
    name: str, help: str, *, usage: str = "", permission: Right | None = None, is_query: bool = False
) -> Callable[[Handler], Handler]:
    """Register a command, as in ``@command("/evernear stop", "ends a run", usage="RUN")``. Slack
    waits 3 seconds for the acknowledgement, so a command may record a request for the worker, but
    must not wait for KFP. A query changes nothing and may take longer. Only the caller sees the
    message that the function returns."""

    def register(run: Handler) -> Handler:
        COMMANDS[name] = Command(name, help, run, usage, permission, is_query)
        return run

    return register


@command(
    "/retrain",
    "starts a training run after confirmation, e.g. `/retrain train.epochs=8`",
    usage="[name=value ...]",
    permission="start",
)
def retrain(call: Call) -> None:
    request_run(call, TRAINING)


@command("/evernear status", "the live release, active runs, open prompts, the watcher", is_query=True)
def status(call: Call) -> Message:
    services = call.services
    active = [run for run in services.runs.list(limit=50) if not run.state.is_final]
    pending = sum(request.state == "pending" for request in services.requests.list())
    live = _made_live(services.registry)
    return status_message(live, active, pending, _watcher_status(services), now=services.clock())


@command("/evernear runs", "the newest runs", is_query=True)
def runs(call: Call) -> Message:
    return runs_message(call.services.runs.list(limit=10), call.services.clock())


@command("/evernear champion", "the live release, its answers on the test images and its promotion", is_query=True)
def champion(call: Call) -> Message:
    registry = call.services.registry
    live = _made_live(registry)
    return champion_message(live, registry.get(live.version, include_pruned=True) if live else None)


@command(
    "/evernear rollback", "rolls back to the previous release after confirmation", permission="promote", is_query=True
)
def rollback(call: Call) -> Message:
    current = call.services.registry.champion()
    if current is None:
        raise StoreError("There is nothing to roll back to: no release has been promoted yet.")
    current.rollback_target()
    return rollback_message(current)


@command("/evernear stop", "ends a run, given the first characters of its id", usage="RUN", permission="start")
def stop(call: Call) -> None:
    run_id = call.text.strip()
    if len(run_id.split()) != 1 or len(run_id) < RUN_ID_MIN_CHARACTERS:
        raise RequestRefusedError(f"Which run? /evernear stop RUN, with at least {RUN_ID_MIN_CHARACTERS} characters.")
    call.record("stop", request_id("stop", call.trigger), text=run_id[:100])


@command("/evernear schedule", "whether the watcher checks on its schedule, and its last result", is_query=True)
def schedule(call: Call) -> Message:
    return line(f"The watcher is {_watcher_status(call.services)}")


@command("/evernear schedule start", "resumes the watcher", permission="start")
def schedule_start(call: Call) -> Message:
    return _switch_schedule(call, on=True)


@command("/evernear schedule stop", "pauses the watcher", permission="start")
def schedule_stop(call: Call) -> Message:
    return _switch_schedule(call, on=False)


def help_message() -> Message:
    lines = [
        f"• `{command.name}{f' {command.usage}' if command.usage else ''}` {command.help}"
        for command in COMMANDS.values()
    ]
    intro = "I start training runs, follow them and report their results."
    review = "Live queries are labeled on the Review page of the console, `evernear console`."
    names = ", ".join(COMMANDS)
    return Message(text=f"{intro} Commands: {names}.", blocks=(section("\n".join([intro, *lines, review])),))


def status_message(live: Promotion | None, active: Sequence[Run], pending: int, watcher: str, now: datetime) -> Message:
    running = ", ".join(f"{link(run.url, run.name)} for {duration(now - run.created)}" for run in active)
    lines = [
        f"*Live release* {escape(live.version)} since {date(live.since)}" if live else "*Live release* none yet",
        f"*Active runs* {running or 'none'}",
        f"*Open prompts* {pending or 'none'}",
        f"*Watcher* {escape(watcher)}",
    ]
    return Message(text="Status", blocks=(section("\n".join(lines)),))


def runs_message(newest: Sequence[Run], now: datetime) -> Message:
    lines = [
        f"{EMOJI[run.state]} {code(run.id[:8])} {link(run.url, run.name)}: {run.state}, "
        f"{duration((run.ended or now) - run.created)}, {date(run.created)}"
        for run in newest
    ]
    return Message(text="The newest runs", blocks=(section(join_lines(lines) or "No runs yet."),))


def _made_live(registry: Registry) -> Promotion | None:
    current = registry.champion()
    return registry.pointer.made_live(current) if current else None


def champion_message(promotion: Promotion | None, record: Record | None) -> Message:
    """``promotion`` made the champion live."""
    if promotion is None or record is None:
        return line("No release has been promoted yet.")
    metrics = record.manifest.metrics
    text = f"*{escape(promotion.version)}* is live since {date(promotion.since)}: {escape(promotion.how)} by " + (
        escape(promotion.by) or "an unknown person"
    )
    if promotion.why:
        text += f"\n_{escape(promotion.why)}_"
    facts = fields(
        {
            "Measured": escape(headline(metrics)) or "not measured",
            "Classes": str(len(record.manifest.labels)),
            "Rollback target": escape(promotion.previous or "") or "none: this is the first release",
        }
    )
    return Message(text=f"{escape(promotion.version)} is live", blocks=(section(text), facts))


def rollback_message(current: Champion) -> Message:
    text = f"*{escape(current.version)}* is live. A rollback restores *{escape(current.previous or '')}*."
    return Message(text=text, blocks=(section(text), *actions(*roll_back_buttons(current))))


def _switch_schedule(call: Call, on: bool) -> Message:
    person = str(call.person)
    ScheduleStore(call.services.store).switch(on, person)
    call.audit("schedule_start" if on else "schedule_stop", "done")
    return line(f"The watcher is {_watcher_status(call.services)}")


def _watcher_status(services: Services) -> str:
    state = ScheduleStore(services.store).read()
    by = f" by {state.by}" if state.by else ""
    last = f" Last check {state.last.at:%Y-%m-%d %H:%M} UTC: {state.last.action}." if state.last else ""
    return f"{'on' if state.on else 'off'}{by} since {state.since:%Y-%m-%d %H:%M} UTC.{last}"
