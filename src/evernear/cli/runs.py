"""Print a run on Kubeflow Pipelines, and follow it until it ends."""

import sys
import time
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from evernear.common.output import print_json, print_line, printable
from evernear.common.retry import doubling, retry
from evernear.errors import EvernearError, FormatError, IntegrityError, PipelineServerError, SettingsError, StoreError

if TYPE_CHECKING:
    from evernear.common.run_record import RunRecord
    from evernear.common.store import Store
    from evernear.kubeflow.client import KfpRuns
    from evernear.kubeflow.runs import KfpStep, Run
    from evernear.reporting.notify import RunOutcome

POLL_S = 2.0


def follow(runs: "KfpRuns", run: "Run", as_json: bool) -> None:
    """Print each step when it ends. kfp's own wait function ignores the states CANCELED and FAILED.

    Raises:
        EvernearError: the run failed or was stopped.
    """
    console = Console(stderr=True, force_terminal=sys.stderr.isatty())
    console.print(Text(printable(f"Run {run.id}  {run.url}")), soft_wrap=True)
    printed: set[str] = set()
    with console.status("waiting for the first step") as status:
        while True:
            run = _get(runs, run.id)
            for step in run.steps:
                if step.state.is_final and step.name not in printed:
                    printed.add(step.name)
                    console.print(Text(printable(_step_line(step))), soft_wrap=True)
            if run.state.is_final:
                break
            running = [step.name for step in run.steps if not step.state.is_final]
            status.update(Text(printable(f"{run.state}: {', '.join(running) or 'waiting for the next step'}")))
            time.sleep(POLL_S)
    outcome = outcome_of(run, runs)
    show(run, outcome, as_json, steps=False)
    if run.state not in ("succeeded", "skipped"):
        raise EvernearError(_failure(run, outcome))


def show(run: "Run", outcome: "RunOutcome | None", as_json: bool, steps: bool = True) -> None:
    if as_json:
        print_json({**run.model_dump(), "outcome": outcome})
        return
    print_line(f"{title(run)}: {run.state}. {run.url}".rstrip())
    for step in run.steps if steps else ():
        print_line(_step_line(step))
    if outcome is not None:
        print_line(outcome.summary())
        for step in outcome.next_steps():
            print_line(f"Next: {step.command}")
        print_line(f"Run page: evernear report {run.id}")
    elif run.state == "succeeded":
        print_line("The outcome is unknown: the run's store is not readable from here, or has no record of this run.")


def title(run: "Run") -> str:
    return f"Run {run.id} of {run.pipeline} {run.pipeline_version}".rstrip()


def row(run: "Run") -> tuple[str, ...]:
    version = run.pipeline_version
    return run.id, run.pipeline, version, run.state, f"{run.created:%Y-%m-%d %H:%M}", _duration(run.created, run.ended)


def outcome_of(run: "Run", runs: "KfpRuns") -> "RunOutcome | None":
    """A finished run's outcome, or None if there is none or its store is not readable from here."""
    from evernear.kubeflow.runs import outcome_of as outcome_in

    record = record_of(run, runs) if run.state.is_final else None
    try:
        return outcome_in(record.store, run) if record else None
    except (StoreError, IntegrityError):
        return None


def record_of(run: "Run", runs: "KfpRuns") -> "RunRecord | None":
    """The run's record, or None if its store is not readable from here."""
    from evernear.common.run_record import RunRecord

    try:
        store = store_of(run.parameters, runs, run.pipeline)
    except (PipelineServerError, FormatError):
        return None
    return RunRecord(store, run.id) if store else None


def store_of(arguments: dict[str, object], runs: "KfpRuns", pipeline: str) -> "Store | None":
    """The run's store, or None without access keys for it or without its directory."""
    from evernear.common.store import FileStore, open_store
    from evernear.common.store.current import current_store

    default = next((p.default for p in runs.parameters(pipeline) if p.name == "store"), "")
    uri = str(arguments.get("store") or default)
    try:
        store = open_store(uri)
    except SettingsError:
        return None
    if isinstance(store, FileStore) and not store.root.is_dir():
        return None
    # Anonymous requests could reach someone else's bucket with this name.
    return None if uri.startswith("s3://") and not store.identity else current_store(uri)


def _get(runs: "KfpRuns", run_id: str) -> "Run":
    """Get the run's state, with retries, so waiting continues after a server restart."""
    return retry(lambda: runs.show(run_id), on=PipelineServerError, pauses_s=islice(doubling(POLL_S, 30.0), 9))


def _step_line(step: "KfpStep") -> str:
    marks = {"succeeded": "ok", "skipped": "--", "failed": "!!", "canceled": "!!"}
    duration = f"{(step.ended - step.started).total_seconds():6.0f} s" if step.started and step.ended else " " * 8
    detail = step.error or ("" if step.state == "succeeded" else step.state)
    return f"  {marks.get(step.state, '..')} {step.name:<10} {duration}  {detail}".rstrip()


def _failure(run: "Run", outcome: "RunOutcome | None") -> str:
    if outcome is not None and outcome.state in ("failed", "stopped"):
        return f"The run {run.id} {outcome.summary()}"
    if run.state == "canceled":
        return f"The run {run.id} was stopped."
    failed = [step for step in run.steps if step.state == "failed"]
    where = f" at {failed[0].name}" if failed else ""
    reasons = [step.error for step in failed if step.error] or [run.error]
    return f"The run {run.id} failed{where}: {' '.join(filter(None, reasons)) or 'see the logs in KFP.'}"


def _duration(start: datetime, end: datetime | None) -> str:
    if end is None:
        return "-"
    minutes, seconds = divmod(int((end - start).total_seconds()), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
