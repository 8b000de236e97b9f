"""``evernear pipeline``: compile the pipelines, and run them on Kubeflow Pipelines."""

import os
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from evernear.cli.interrupts import interrupt_says
from evernear.cli.options import ConfigOption, JsonOption, PresetOption, settings_of
from evernear.cli.tables import print_table
from evernear.errors import EvernearError, IntegrityError, PipelineServerError, SettingsError, StoreError
from evernear.output import print_json, print_line, printable
from evernear.settings import PipelineSettings

if TYPE_CHECKING:
    from evernear.kubeflow.client import KfpRuns
    from evernear.kubeflow.runs import Run, Step
    from evernear.reporting.notify import Outcome
    from evernear.run_record import RunRecord
    from evernear.store import Store

DEFAULT = "continuous-training"
POLL_S = 2.0

app = typer.Typer(
    rich_markup_mode="markdown",
    no_args_is_help=True,
    help="Kubeflow Pipelines: compile, upload, run, schedule, look, stop.",
)
PipelinesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="PIPELINE...", help="All of them, if none is named.")
]
PipelineArgument = Annotated[str, typer.Argument(metavar="PIPELINE")]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's id, as `evernear pipeline status` lists it.")
]
ImageOption = Annotated[str, typer.Option("--image", metavar="REF@sha256:...", help="Training image by digest.")]
VersionOption = Annotated[str | None, typer.Option("--version", help="Name of the version, if not the git commit.")]
EndpointOption = Annotated[
    str | None, typer.Option("--endpoint", metavar="URL", help="KFP API, if not pipeline.endpoint.")
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", metavar="NAME", help="On a multi-user KFP, if not pipeline.namespace.")
]
ParameterOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting or pipeline parameter: train.epochs=20, task_cpu=4"),
]
SourceOption = Annotated[
    str | None, typer.Option("--source", metavar="SOURCE", help="Images to train on: s3://bucket/prefix, mnist ...")
]
TargetOption = Annotated[
    str | None, typer.Option("--target", metavar="TARGET", help="Where a promoted release goes: registry | kubernetes")
]
ServingImageOption = Annotated[
    str | None, typer.Option("--serving-image", metavar="REF@sha256:...", help="Image of the serving pods by digest.")
]
StoreOption = Annotated[
    str | None, typer.Option("--store", metavar="URI", help="Object store of the runs: s3://bucket/prefix")
]


@app.command(name="compile")
def compile_(
    image: ImageOption,
    pipelines: PipelinesArgument = None,
    source: SourceOption = None,
    target: TargetOption = None,
    serving_image: ServingImageOption = None,
    store: StoreOption = None,
    defaults: ParameterOption = None,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Where to.")] = Path(),
    kubernetes_native: Annotated[
        bool,
        typer.Option("--kubernetes-native", help="As manifests for kubectl, for a KFP that keeps pipelines there."),
    ] = False,
    version: VersionOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Write the pipelines for a cluster, the same bytes each time: DIR/PIPELINE.yaml. The options pin defaults."""
    from evernear.disk import write_atomically
    from evernear.kubeflow.compiled import as_manifests

    pinned = _words(defaults, source=source, target=target, serving_image=serving_image, store=store)
    compiled = _compiled(pipelines, image, pinned)
    if kubernetes_native:
        commit = version or _commit()
        compiled = {name: as_manifests(content, commit, namespace or "") for name, content in compiled.items()}
    for name, content in compiled.items():
        path = output / f"{name}.yaml"
        try:
            output.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
        except OSError as error:
            raise SettingsError(f"{path} cannot be written: {error.strerror}.") from None
        print_line(str(path))


@app.command()
def upload(
    image: ImageOption,
    pipelines: PipelinesArgument = None,
    source: SourceOption = None,
    target: TargetOption = None,
    serving_image: ServingImageOption = None,
    store: StoreOption = None,
    defaults: ParameterOption = None,
    version: VersionOption = None,
    endpoint: EndpointOption = None,
    namespace: NamespaceOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Upload the pipelines as a new version with this image. The options pin defaults; a repeat changes nothing."""
    settings = _settings(config, endpoint, namespace)
    commit = version or _commit()
    from evernear.kubeflow.publish import Publisher

    pinned = _words(defaults, source=source, target=target, serving_image=serving_image, store=store)
    compiled = _compiled(pipelines, image, pinned)
    publisher = Publisher(settings)
    uploaded = [publisher.upload(content, commit) for content in compiled.values()]
    if as_json:
        print_json(uploaded)
        return
    for one in uploaded:
        done = "uploaded" if one.new else "already exists, unchanged"
        print_line(f"{one.pipeline} {one.version}: {done}.")


@app.command()
def run(
    pipeline: PipelineArgument = DEFAULT,
    source: SourceOption = None,
    preset: PresetOption = None,
    target: TargetOption = None,
    serving_image: ServingImageOption = None,
    parameters: ParameterOption = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow the run; exit with 1 if it fails or is stopped.")
    ] = False,
    key: Annotated[
        str | None, typer.Option("--key", metavar="KEY", help="A second start with the same key finds the first's run.")
    ] = None,
    endpoint: EndpointOption = None,
    namespace: NamespaceOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start the newest version of a pipeline. What is not set keeps the default that the upload pinned."""
    from evernear.triggers.parameters import caller, combine, from_words

    runs = _runs(_settings(config, endpoint, namespace))
    words = _words(parameters, source=source, preset=preset, target=target, serving_image=serving_image)
    arguments = combine({"started_by": caller()}, from_words(words, runs.parameters(pipeline)))
    store = _open_store(arguments.get("store") or _default_store(runs, pipeline))
    started = runs.start(pipeline, arguments, key or _new_key(), store)
    if wait:
        goes_on = f"`evernear pipeline status {started.id}` follows it, `evernear pipeline stop {started.id}` ends it"
        with interrupt_says(f"Interrupted. The run {started.id} goes on in Kubeflow Pipelines; {goes_on}."):
            _follow(runs, started, as_json)
    elif as_json:
        print_json(started)
    else:
        print_line(f"{_title(started)} is {started.state}. {started.url}".rstrip())


@app.command()
def schedule(
    pipeline: PipelineArgument = DEFAULT,
    cron: Annotated[
        str | None,
        typer.Option(
            "--cron",
            metavar="CRON",
            help="'0 3 * * *': each night at three, by the server's clock, which is UTC as a rule.",
        ),
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="End the schedule instead; runs at work go on.")] = False,
    source: SourceOption = None,
    preset: PresetOption = None,
    target: TargetOption = None,
    serving_image: ServingImageOption = None,
    parameters: ParameterOption = None,
    endpoint: EndpointOption = None,
    namespace: NamespaceOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the newest version by the clock, instead of whatever schedule the pipeline had."""
    if (cron is None) != off:
        raise SettingsError("Give either --cron '0 3 * * *' (each night at three) or --off.")
    settings = _settings(config, endpoint, namespace)
    from evernear.kubeflow.publish import Publisher

    publisher = Publisher(settings)
    if cron is None:
        ended = publisher.unschedule(pipeline)
        if as_json:
            print_json({"ended": ended})
        else:
            print_line(f"{pipeline}: {ended or 'no'} schedule ended.")
        return
    from evernear.triggers.parameters import caller, combine, from_words

    words = _words(parameters, source=source, preset=preset, target=target, serving_image=serving_image)
    arguments = from_words(words, publisher.runs.parameters(pipeline))
    started_by = f"the schedule {cron} of {caller()}"
    made = publisher.schedule(pipeline, cron, combine({"started_by": started_by}, arguments))
    if as_json:
        print_json(made)
    else:
        print_line(f"{made.pipeline} runs at {made.cron} (seconds first).")


@app.command()
def status(
    run_id: Annotated[
        str | None, typer.Argument(metavar="RUN", help="If none: the newest runs, and the schedules.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, metavar="N")] = 10,
    endpoint: EndpointOption = None,
    namespace: NamespaceOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell of one run, step by step, or of the newest runs and of what runs by the clock."""
    settings = _settings(config, endpoint, namespace)
    if run_id is not None:
        runs = _runs(settings)
        found = runs.show(run_id)
        _tell(found, _outcome(found, runs), as_json)
        return
    from evernear.kubeflow.publish import Publisher

    publisher = Publisher(settings)
    listed, schedules = publisher.runs.list(limit=limit), publisher.schedules()
    if as_json:
        print_json({"runs": listed, "schedules": schedules})
        return
    rows = [
        (one.id, one.pipeline, one.pipeline_version[:12], one.state, _minute(one.created), _span(one)) for one in listed
    ]
    print_table(("run", "pipeline", "version", "state", "started (UTC)", "took"), rows)
    for one in schedules:
        print_line(f"{one.pipeline} runs at {one.cron} (seconds first), {one.state}.")


@app.command()
def stop(
    run_id: RunArgument,
    endpoint: EndpointOption = None,
    namespace: NamespaceOption = None,
    config: ConfigOption = None,
) -> None:
    """Stop a run. Its exit step still runs, and records who stopped it."""
    from evernear.triggers.parameters import caller

    runs = _runs(_settings(config, endpoint, namespace))
    found = runs.show(run_id)
    if found.state.is_final:
        print_line(f"Run {run_id} had ended already: {found.state}.")
        return
    by, record = caller(), _record(found, runs)
    try:
        if record is not None:
            record.save_stop(by, datetime.now(UTC))
    except StoreError:
        record = None
    runs.stop(run_id)
    unnamed = "" if record else " The run's store is not writable from here, so its record will not say who stopped it."
    print_line(f"Run {run_id} is stopping.{unnamed}")


def _settings(config: Path | None, endpoint: str | None, namespace: str | None) -> PipelineSettings:
    given = {"endpoint": endpoint, "namespace": namespace}
    flags = [f"pipeline.{key}={value}" for key, value in given.items() if value is not None]
    return settings_of(None, config, flags, None).pipeline


def _runs(settings: PipelineSettings) -> "KfpRuns":
    from evernear.kubeflow.client import KfpRuns

    return KfpRuns(settings)


def _commit() -> str:
    from evernear.release.git import git_commit

    if commit := git_commit():
        return commit
    raise SettingsError("This evernear is not of a git checkout, so that the version has no name; give --version.")


def _new_key() -> str:
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _compiled(pipelines: list[str] | None, image: str, defaults: list[str]) -> dict[str, bytes]:
    """Each pipeline for a cluster; a default goes to all those that have the parameter."""
    from evernear.kubeflow import NAMES
    from evernear.kubeflow.compiled import for_cluster, parameters_of, with_defaults
    from evernear.triggers.parameters import from_words

    compiled = {name: for_cluster(name, image) for name in pipelines or NAMES}
    known = {name: parameters_of(content) for name, content in compiled.items()}
    arguments = from_words(defaults, [parameter for parameters in known.values() for parameter in parameters])
    for name, content in compiled.items():
        own = {parameter.name for parameter in known[name]}
        compiled[name] = with_defaults(content, {name: value for name, value in arguments.items() if name in own})
    return compiled


def _words(words: list[str] | None, **options: str | None) -> list[str]:
    """``--set`` words, with the options that have a name of their own."""
    return [f"{name}={value}" for name, value in options.items() if value is not None] + list(words or [])


def _follow(runs: "KfpRuns", started: "Run", as_json: bool) -> None:
    """Show each step as it ends, until the run does; KFP's own wait knows neither CANCELED nor FAILED.

    Raises:
        EvernearError: the run failed or was stopped.
    """
    console = Console(stderr=True)
    console.print(Text(printable(f"Run {started.id}  {started.url}")), soft_wrap=True)
    told: set[str] = set()
    with console.status("waiting for the first step") as shown:
        while True:
            found = _show_patiently(runs, started.id)
            for step in found.steps:
                if step.state.is_final and step.name not in told:
                    told.add(step.name)
                    console.print(Text(printable(_line(step))), soft_wrap=True)
            if found.state.is_final:
                break
            working = [step.name for step in found.steps if not step.state.is_final]
            shown.update(Text(printable(f"{found.state}: {', '.join(working) or 'waiting for the next step'}")))
            time.sleep(POLL_S)
    outcome = _outcome(found, runs)
    _tell(found, outcome, as_json, steps=False)
    if found.state not in ("succeeded", "skipped"):
        raise EvernearError(_why(found, outcome))


def _show_patiently(runs: "KfpRuns", run_id: str, attempts: int = 10) -> "Run":
    """A server that restarts does not end the wait for a run of hours."""
    for attempt in range(1, attempts + 1):
        try:
            return runs.show(run_id)
        except PipelineServerError:
            if attempt == attempts:
                raise
            time.sleep(POLL_S * attempt)
    raise AssertionError("not reached")


def _outcome(run: "Run", runs: "KfpRuns") -> "Outcome | None":
    """The outcome of a run that ended; None where it recorded none, or its store is not readable from here."""
    from evernear.reporting.notify import load_outcome

    record = _record(run, runs) if run.state.is_final else None
    try:
        return load_outcome(record.store, run.id) if record else None
    except (StoreError, IntegrityError):
        return None


def _record(run: "Run", runs: "KfpRuns") -> "RunRecord | None":
    """The run's record in its store; None where this process cannot open the store."""
    from evernear.run_record import RunRecord

    try:
        store = _open_store(run.parameters.get("store") or _default_store(runs, run.pipeline))
    except PipelineServerError:
        return None
    return RunRecord(store, run.id) if store else None


def _open_store(uri: str) -> "Store | None":
    """The store of a run in the cluster; None where this process has no keys for it, or no such directory."""
    from evernear.store import open_store

    if uri.startswith("s3://") and "AWS_ACCESS_KEY_ID" not in os.environ:
        return None  # do not ask whoever else has a bucket of that name
    if uri.startswith("file://") and not Path(uri.removeprefix("file://")).is_dir():
        return None
    try:
        return open_store(uri)
    except SettingsError:
        return None


def _default_store(runs: "KfpRuns", pipeline: str) -> str:
    return next((p.default for p in runs.parameters(pipeline) if p.name == "store"), "")


def _tell(run: "Run", outcome: "Outcome | None", as_json: bool, steps: bool = True) -> None:
    if as_json:
        print_json({**run.model_dump(), "outcome": outcome})
        return
    print_line(f"{_title(run)}: {run.state}. {run.url}".rstrip())
    for step in run.steps if steps else ():
        print_line(_line(step))
    if outcome is not None:
        print_line(outcome.summary())
        if command := outcome.next_command():
            print_line(f"Next: {command}")
    elif run.state == "succeeded":
        print_line("The outcome is unknown: the run's store is not readable from here, or has no record of this run.")


def _title(run: "Run") -> str:
    return f"Run {run.id} of {run.pipeline} {run.pipeline_version[:12]}".rstrip()


def _line(step: "Step") -> str:
    marks = {"succeeded": "ok", "skipped": "--", "failed": "!!", "canceled": "!!"}
    took = f"{(step.ended - step.started).total_seconds():6.0f} s" if step.started and step.ended else " " * 8
    words = step.error or ("" if step.state in marks and step.state == "succeeded" else step.state)
    return f"  {marks.get(step.state, '..')} {step.name:<10} {took}  {words}".rstrip()


def _why(run: "Run", outcome: "Outcome | None") -> str:
    if outcome is not None and outcome.state in ("failed", "stopped"):
        return f"The run {run.id} {outcome.summary()}"
    if run.state == "canceled":
        return f"The run {run.id} was stopped."
    failed = [step for step in run.steps if step.state == "failed"]
    where = f" at {failed[0].name}" if failed else ""
    reasons = [step.error for step in failed if step.error] or [run.error]
    return f"The run {run.id} failed{where}: {' '.join(filter(None, reasons)) or 'see its log in KFP.'}"


def _minute(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M}"


def _span(run: "Run") -> str:
    if run.ended is None:
        return "-"
    minutes, seconds = divmod(int((run.ended - run.created).total_seconds()), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
