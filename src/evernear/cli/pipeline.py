"""``evernear pipeline``: compile the pipelines, and run them on Kubeflow Pipelines."""

import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from evernear.cli.interrupts import interrupt_says
from evernear.cli.options import ConfigOption, JsonOption, PresetOption, assignments, local_settings, with_options
from evernear.cli.runs import follow, outcome_of, record_of, row, show, store_of, title
from evernear.cli.tables import print_table
from evernear.errors import SettingsError, StoreError
from evernear.output import print_json, print_line
from evernear.settings import PipelineSettings

DEFAULT = "continuous-training"

app = typer.Typer(
    rich_markup_mode="markdown",
    no_args_is_help=True,
    help="Compile, upload, run, schedule, show and stop pipelines on Kubeflow Pipelines.",
)
PipelinesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="PIPELINE...", help="Pipelines to include. [all]")
]
PipelineArgument = Annotated[str, typer.Argument(metavar="PIPELINE")]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's id, as `evernear pipeline status` lists it.")
]
ImageOption = Annotated[str, typer.Option("--image", metavar="REF@sha256:...", help="Training image by digest.")]
VersionOption = Annotated[str | None, typer.Option("--version", help="Name of the version. [the git commit]")]
EndpointOption = Annotated[
    str | None, typer.Option("--endpoint", metavar="URL", help="URL of the KFP API. [pipeline.endpoint]")
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", metavar="NAME", help="Namespace on a multi-user KFP. [pipeline.namespace]")
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


def server_settings(
    endpoint: EndpointOption = None, namespace: NamespaceOption = None, config: ConfigOption = None
) -> PipelineSettings:
    """The Kubeflow Pipelines server."""
    options = {"pipeline.endpoint": endpoint, "pipeline.namespace": namespace}
    return local_settings(config, assignments(None, **options)).pipeline


def run_words(
    source: SourceOption = None,
    preset: PresetOption = None,
    target: TargetOption = None,
    serving_image: ServingImageOption = None,
    parameters: ParameterOption = None,
) -> list[str]:
    """The parameters of a run, as ``key=value``."""
    return assignments(parameters, source=source, preset=preset, target=target, serving_image=serving_image)


def default_words(
    source: SourceOption = None,
    target: TargetOption = None,
    serving_image: ServingImageOption = None,
    store: StoreOption = None,
    defaults: ParameterOption = None,
) -> list[str]:
    """The defaults of a pipeline version, as ``key=value``."""
    return assignments(defaults, source=source, target=target, serving_image=serving_image, store=store)


@app.command(name="compile")
@with_options(pinned=default_words)
def compile_(
    pinned: list[str],
    image: ImageOption,
    pipelines: PipelinesArgument = None,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Output directory.")] = Path(),
    kubernetes_native: Annotated[
        bool,
        typer.Option(
            "--kubernetes-native", help="Write Kubernetes manifests, for a KFP that stores pipelines in the cluster."
        ),
    ] = False,
    version: VersionOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Write the pipelines for a cluster as DIR/PIPELINE.yaml, the same bytes each time. Options set their defaults."""
    from evernear.disk import write_atomically
    from evernear.kubeflow.compiled import as_manifests

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
            raise SettingsError(f"Cannot write {path}: {error.strerror}.") from None
        print_line(str(path))


@app.command()
@with_options(pinned=default_words, server=server_settings)
def upload(
    pinned: list[str],
    server: PipelineSettings,
    image: ImageOption,
    pipelines: PipelinesArgument = None,
    version: VersionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Upload the pipelines as a new version with this image. Options set their defaults. A repeat changes nothing."""
    commit = version or _commit()
    from evernear.kubeflow.publish import Publisher

    compiled = _compiled(pipelines, image, pinned)
    publisher = Publisher(server)
    uploaded = [publisher.upload(content, commit) for content in compiled.values()]
    if as_json:
        print_json(uploaded)
        return
    for one in uploaded:
        done = "uploaded" if one.new else "already exists, unchanged"
        print_line(f"{one.pipeline} {one.version}: {done}.")


@app.command()
@with_options(words=run_words, server=server_settings)
def run(
    words: list[str],
    server: PipelineSettings,
    pipeline: PipelineArgument = DEFAULT,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow the run; exit with 1 if it fails or is stopped.")
    ] = False,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="KEY", help="Idempotency key: a second start with it returns the first run."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Start the newest version of a pipeline. Unset parameters keep the defaults of that version."""
    from evernear.kubeflow.client import KfpRuns
    from evernear.triggers.parameters import caller, combine, from_words

    runs = KfpRuns(server)
    arguments = combine({"started_by": caller()}, from_words(words, runs.parameters(pipeline)))
    started = runs.start(pipeline, arguments, key or _new_key(), store_of(arguments, runs, pipeline))
    if wait:
        commands = f"`evernear pipeline status {started.id}` shows it, `evernear pipeline stop {started.id}` stops it"
        with interrupt_says(f"Interrupted. The run {started.id} continues in Kubeflow Pipelines; {commands}."):
            follow(runs, started, as_json)
    elif as_json:
        print_json(started)
    else:
        print_line(f"{title(started)} is {started.state}. {started.url}".rstrip())


@app.command()
@with_options(words=run_words, server=server_settings)
def schedule(
    words: list[str],
    server: PipelineSettings,
    pipeline: PipelineArgument = DEFAULT,
    cron: Annotated[
        str | None,
        typer.Option(
            "--cron",
            metavar="CRON",
            help="Schedule, such as '0 3 * * *': daily at 3:00 of the server's clock, usually UTC.",
        ),
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Remove the schedule instead; active runs continue.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run the newest version on a schedule, which replaces the pipeline's present schedule."""
    if (cron is None) != off:
        raise SettingsError("Pass either --cron '0 3 * * *' (daily at 3:00) or --off.")
    from evernear.kubeflow.publish import Publisher

    publisher = Publisher(server)
    if cron is None:
        ended = publisher.unschedule(pipeline)
        if as_json:
            print_json({"ended": ended})
        else:
            print_line(f"{pipeline}: {ended or 'no'} schedule ended.")
        return
    from evernear.triggers.parameters import caller, combine, from_words

    arguments = from_words(words, publisher.runs.parameters(pipeline))
    started_by = f"the schedule {cron} of {caller()}"
    made = publisher.schedule(pipeline, cron, combine({"started_by": started_by}, arguments))
    if as_json:
        print_json(made)
    else:
        print_line(f"{made.pipeline} runs at {made.cron} (seconds first).")


@app.command()
@with_options(server=server_settings)
def status(
    server: PipelineSettings,
    run_id: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Id of a run. [the newest runs and the schedules]")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, metavar="N")] = 10,
    as_json: JsonOption = False,
) -> None:
    """Show one run step by step, or the newest runs and the schedules."""
    if run_id is not None:
        from evernear.kubeflow.client import KfpRuns

        runs = KfpRuns(server)
        found = runs.show(run_id)
        show(found, outcome_of(found, runs), as_json)
        return
    from evernear.kubeflow.publish import Publisher

    publisher = Publisher(server)
    listed, schedules = publisher.runs.list(limit=limit), publisher.schedules()
    if as_json:
        print_json({"runs": listed, "schedules": schedules})
        return
    print_table(("run", "pipeline", "version", "state", "started (UTC)", "took"), map(row, listed))
    for one in schedules:
        print_line(f"{one.pipeline} runs at {one.cron} (seconds first), {one.state}.")


@app.command()
@with_options(server=server_settings)
def stop(
    server: PipelineSettings,
    run_id: RunArgument,
) -> None:
    """Stop a run. Its exit step still runs and records who stopped it."""
    from evernear.kubeflow.client import KfpRuns
    from evernear.triggers.parameters import caller

    runs = KfpRuns(server)
    found = runs.show(run_id)
    if found.state.is_final:
        print_line(f"Run {run_id} has already ended: {found.state}.")
        return
    record = record_of(found, runs)
    try:
        if record is not None:
            record.save_stop(caller(), datetime.now(UTC))
    except StoreError:
        record = None
    runs.stop(run_id)
    unnamed = "" if record else " The run's store is not writable from here, so its record will not say who stopped it."
    print_line(f"Run {run_id} is stopping.{unnamed}")


def _commit() -> str:
    from evernear.release.git import git_commit

    if commit := git_commit():
        return commit
    raise SettingsError(
        "evernear does not run from a git checkout, so the version has no default name; pass --version."
    )


def _new_key() -> str:
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _compiled(pipelines: list[str] | None, image: str, defaults: list[str]) -> dict[str, bytes]:
    """Each pipeline for a cluster. A default applies to every pipeline that has the parameter."""
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
