"""``evernear pipeline``: compile the pipelines, and run them on Kubeflow Pipelines."""

import json
import os
import re
import secrets
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from evernear.cli.interrupts import interrupt_says
from evernear.cli.options import ConfigOption, JsonOption, settings_of
from evernear.cli.tables import print_table
from evernear.errors import EvernearError, IntegrityError, PipelineServerError, SettingsError, StoreError
from evernear.output import print_json, print_line, printable
from evernear.settings import PipelineSettings

if TYPE_CHECKING:
    from evernear.reporting.notify import Outcome
    from evernear.triggers.runs import Parameter, Run, Runs, Step

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
    typer.Option("--set", metavar="NAME=VALUE", help="A parameter of the pipeline: target=local, data.source=mnist"),
]
DefaultOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="What a parameter is by default where these pipelines will run: store=s3://bucket, data.source=...",
    ),
]


@app.command(name="compile")
def compile_(
    image: ImageOption,
    pipelines: PipelinesArgument = None,
    defaults: DefaultOption = None,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Where to.")] = Path(),
    kubernetes_native: Annotated[
        bool,
        typer.Option("--kubernetes-native", help="As manifests for kubectl, for a KFP that keeps pipelines there."),
    ] = False,
    version: VersionOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Write the pipelines for a cluster, the same bytes each time: DIR/PIPELINE.yaml."""
    from evernear.store import write_atomically
    from pipelines.compile import as_manifests

    compiled = _compiled(pipelines, image, defaults)
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
    defaults: DefaultOption = None,
    version: VersionOption = None,
    endpoint: EndpointOption = None,
    namespace: NamespaceOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the pipelines, with this image, a new version on the server; again with the same, that is no error."""
    settings = _settings(config, endpoint, namespace)
    commit = version or _commit()
    from pipelines.publish import Publisher

    compiled = _compiled(pipelines, image, defaults)
    publisher = Publisher(settings)
    uploaded = [publisher.upload(content, commit) for content in compiled.values()]
    if as_json:
        print_json(uploaded)
        return
    for one in uploaded:
        done = "uploaded" if one.new else "is there already, from the same file"
        print_line(f"{one.pipeline} {one.version} {done}.")


@app.command()
def run(
    pipeline: PipelineArgument = DEFAULT,
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
    """Start the newest version of a pipeline."""
    runs = _runs(_settings(config, endpoint, namespace))
    arguments = _arguments(runs.parameters(pipeline), parameters)
    started = runs.start(pipeline, arguments, key or _new_key())
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
    from pipelines.publish import Publisher

    publisher = Publisher(settings)
    if cron is None:
        ended = publisher.unschedule(pipeline)
        if as_json:
            print_json({"ended": ended})
        else:
            print_line(f"{pipeline}: {ended or 'no'} schedule ended.")
        return
    made = publisher.schedule(pipeline, cron, _arguments(publisher.runs.parameters(pipeline), parameters))
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
    from pipelines.publish import Publisher

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
    """Ask a run to end; the exit step still tells what became of it."""
    runs = _runs(_settings(config, endpoint, namespace))
    state = runs.show(run_id).state
    if state.is_final:
        print_line(f"Run {run_id} had ended already: {state}.")
        return
    runs.stop(run_id)
    print_line(f"Run {run_id} is ending.")


def _settings(config: Path | None, endpoint: str | None, namespace: str | None) -> PipelineSettings:
    given = {"endpoint": endpoint, "namespace": namespace}
    flags = [f"pipeline.{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    return settings_of(None, config, flags, None).pipeline


def _runs(settings: PipelineSettings) -> "Runs":
    from pipelines.client import KfpRuns

    return KfpRuns(settings)


def _commit() -> str:
    from evernear.release.commit import git_commit

    if commit := git_commit():
        return commit
    raise SettingsError("This evernear is not of a git checkout, so that the version has no name; give --version.")


def _new_key() -> str:
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _compiled(pipelines: list[str] | None, image: str, defaults: list[str] | None) -> dict[str, bytes]:
    """Each pipeline for a cluster; a default goes to all those that have the parameter."""
    from pipelines.compile import NAMES, for_cluster, parameters_of, with_defaults

    compiled = {name: for_cluster(name, image) for name in pipelines or NAMES}
    known = {name: parameters_of(content) for name, content in compiled.items()}
    _arguments([parameter for parameters in known.values() for parameter in parameters], defaults)  # one has to know it
    for name, content in compiled.items():
        own = {parameter.name for parameter in known[name]}
        words = [word for word in defaults or [] if word.partition("=")[0].partition(".")[0] in own]
        compiled[name] = with_defaults(content, _arguments(known[name], words))
    return compiled


def _arguments(known: "Sequence[Parameter]", words: list[str] | None) -> dict[str, Any]:
    from evernear.triggers.parameters import parse

    for word in words or []:
        if "=" not in word:
            raise SettingsError(f"--set {word!r} has no '='; write --set name=value.")
    # Not shlex.join: `parse` makes curly quotes straight first, and one of them would then end shlex's own.
    line = " ".join(re.sub(r"[^\w=.,:/-]", r"\\\g<0>", word) for word in words or [])
    return parse(line, known, [parameter.name for parameter in known])


def _follow(runs: "Runs", started: "Run", as_json: bool) -> None:
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


def _show_patiently(runs: "Runs", run_id: str, attempts: int = 10) -> "Run":
    """A server that restarts does not end the wait for a run of hours."""
    for attempt in range(1, attempts + 1):
        try:
            return runs.show(run_id)
        except PipelineServerError:
            if attempt == attempts:
                raise
            time.sleep(POLL_S * attempt)
    raise AssertionError("not reached")


def _outcome(run: "Run", runs: "Runs") -> "Outcome | None":
    """What the run told in its store of its release; None where it has not, or the store cannot be read from here."""
    from evernear.reporting.notify import recall_outcome
    from evernear.store import open_store

    if not run.state.is_final:
        return None
    try:
        store = run.parameters.get("store") or _default_store(runs, run.pipeline)
        if store.startswith("s3://") and "AWS_ACCESS_KEY_ID" not in os.environ:
            return None  # nobody here may read it; do not go and ask whoever has a bucket of that name
        return recall_outcome(open_store(store), run.id)
    except (StoreError, IntegrityError, SettingsError, PipelineServerError):
        return None


def _default_store(runs: "Runs", pipeline: str) -> str:
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
    elif run.state == "succeeded":
        print_line(
            "What became of its release is not known here: the run's store cannot be read, or holds no word of it."
        )


def _title(run: "Run") -> str:
    return f"Run {run.id} of {run.pipeline} {run.pipeline_version[:12]}".rstrip()


def _line(step: "Step") -> str:
    marks = {"succeeded": "ok", "skipped": "--", "failed": "!!", "canceled": "!!"}
    took = f"{(step.ended - step.started).total_seconds():6.0f} s" if step.started and step.ended else " " * 8
    words = step.error or ("" if step.state in marks and step.state == "succeeded" else step.state)
    return f"  {marks.get(step.state, '..')} {step.name:<10} {took}  {words}".rstrip()


def _why(run: "Run", outcome: "Outcome | None") -> str:
    failed = [step for step in run.steps if step.state == "failed"]
    if run.state == "canceled":
        return f"The run {run.id} was stopped before its end."
    where = f" at {failed[0].name}" if failed else ""
    reasons = [step.error for step in failed if step.error] or [run.error]
    if outcome is not None and not any(reasons):
        reasons = list(outcome.reasons)
    return f"The run {run.id} failed{where}: {' '.join(filter(None, reasons)) or 'see its log in KFP.'}"


def _minute(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M}"


def _span(run: "Run") -> str:
    if run.ended is None:
        return "-"
    minutes, seconds = divmod(int((run.ended - run.created).total_seconds()), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
