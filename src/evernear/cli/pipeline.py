"""``evernear pipeline``: run the pipelines on Kubeflow Pipelines."""

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evernear.cli.options import (
    ConfigOption,
    JsonOption,
    PresetOption,
    assignments,
    command_again,
    group,
    message_on_interrupt,
    options_of,
)
from evernear.cli.runs import follow, outcome_of, record_of, row, show, store_of, title
from evernear.common.output import print_json, print_line, print_table
from evernear.errors import SettingsError, StoreError
from evernear.settings import PipelineSettings, load

if TYPE_CHECKING:
    from evernear.kubeflow.publish import Schedule

DEFAULT = "continuous-training"

app = group("pipeline", "Upload, run, schedule, show and stop pipelines on Kubeflow Pipelines.")
PipelineArgument = Annotated[str, typer.Argument(metavar="PIPELINE")]
EndpointOption = Annotated[
    str | None, typer.Option("--endpoint", metavar="URL", help="URL of the KFP API. [pipeline.endpoint]")
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", metavar="NAME", help="Namespace on a multi-user KFP. [pipeline.namespace]")
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


def server_settings(
    endpoint: EndpointOption = None, namespace: NamespaceOption = None, config: ConfigOption = None
) -> PipelineSettings:
    return _server_settings((), endpoint, namespace, config)


def _server_settings(
    words: Sequence[str], endpoint: str | None, namespace: str | None, config: Path | None
) -> PipelineSettings:
    """The Kubeflow Pipelines server's settings. A working directory's are for this machine."""
    options = {"pipeline.endpoint": endpoint, "pipeline.namespace": namespace}
    return load(config=config, overrides=assignments([*words], **options), remembered=False).pipeline


def run_assignments(
    source: SourceOption = None,
    preset: PresetOption = None,
    target: TargetOption = None,
    serving_image: ServingImageOption = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting or pipeline parameter: train.epochs=20"),
    ] = None,
) -> list[str]:
    """A run's parameters as ``key=value``."""
    return assignments(parameters, source=source, preset=preset, target=target, serving_image=serving_image)


def default_assignments(
    source: SourceOption = None,
    target: TargetOption = None,
    serving_image: ServingImageOption = None,
    store: Annotated[
        str | None, typer.Option("--store", metavar="URI", help="Object store of the runs: s3://bucket/prefix")
    ] = None,
    defaults: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="The default of a setting or pipeline parameter, or a fact about the cluster: pipeline.task_memory=8G",
        ),
    ] = None,
) -> list[str]:
    """The parameter defaults of a pipeline version as ``key=value``."""
    return assignments(defaults, source=source, target=target, serving_image=serving_image, store=store)


@app.command()
@options_of(default_assignments)
def upload(
    defaults: list[str],
    image: Annotated[str, typer.Option("--image", metavar="REF@sha256:...", help="Training image by digest.")],
    pipelines: Annotated[
        list[str] | None, typer.Argument(metavar="PIPELINE...", help="Pipelines to include. [all]")
    ] = None,
    version: Annotated[str | None, typer.Option("--version", help="Name of the version. [the git commit]")] = None,
    as_json: JsonOption = False,
    endpoint: EndpointOption = None,
    namespace: NamespaceOption = None,
    config: ConfigOption = None,
) -> None:
    """Upload pipelines as a new version that uses this image. Each option sets the default of its
    parameter.

    The version's name ends in a hash of these defaults and of the settings that describe the
    cluster, such as pipeline.task_memory. The newest version with the same name and content is left
    unchanged. An older one is uploaded again with a number after its name, so that it starts.
    """
    from evernear.kubeflow.publish import Publisher, compile_pipelines, default_version, words_of_section

    of_server, defaults = words_of_section(defaults)
    server = _server_settings(of_server, endpoint, namespace, config)
    named = default_version(version, server, defaults)
    compiled = compile_pipelines(pipelines, image, defaults, server)
    publisher = Publisher(server)
    uploaded = [publisher.upload(content, named) for content in compiled.values()]
    if as_json:
        print_json(uploaded)
        return
    for version_ in uploaded:
        result = "uploaded" if version_.new else "already exists, unchanged"
        print_line(f"{version_.pipeline} {version_.version}: {result}.")


@app.command()
@options_of(server_settings)
@options_of(run_assignments)
def run(
    assigned: list[str],
    server: PipelineSettings,
    context: typer.Context,
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
    """Start the newest version of a pipeline. Parameters that are not set keep the defaults of the
    pipeline version."""
    from evernear.kubeflow.client import KfpRuns
    from evernear.kubeflow.runs import caller, from_words, to_start

    runs = KfpRuns(server)
    known, key = runs.parameters(pipeline), key or _new_key()
    arguments = to_start(pipeline, known, caller(), from_words(assigned, known))
    again = command_again(context, "--key", key)
    started = runs.start(pipeline, arguments, key, store_of(arguments, runs, pipeline), again)
    if wait:
        commands = f"`evernear pipeline status {started.id}` shows it; `evernear pipeline stop {started.id}` stops it"
        with message_on_interrupt(f"Interrupted. The run {started.id} continues in Kubeflow Pipelines; {commands}."):
            follow(runs, started, as_json)
    elif as_json:
        print_json(started)
    else:
        print_line(f"{title(started)} is {started.state}. {started.url}".rstrip())


@app.command()
@options_of(server_settings)
@options_of(run_assignments)
def schedule(
    assigned: list[str],
    server: PipelineSettings,
    pipeline: PipelineArgument = DEFAULT,
    cron: Annotated[
        str | None,
        typer.Option(
            "--cron",
            metavar="CRON",
            help="Schedule such as '0 3 * * *' (daily at 3:00), in the server's time zone.",
        ),
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Remove the schedule instead; active runs continue.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run the newest version on a schedule that replaces the pipeline's current schedule."""
    if (cron is None) != off:
        raise SettingsError("Pass either --cron '0 3 * * *' (daily at 3:00) or --off.")
    from evernear.kubeflow.publish import Publisher

    publisher = Publisher(server)
    if cron is None:
        removed = publisher.unschedule(pipeline)
        if as_json:
            print_json({"removed": removed})
        else:
            print_line(f"{pipeline}: {removed or 'no'} schedule removed.")
        return
    from evernear.kubeflow.runs import caller, from_words, to_start

    known = publisher.runs.parameters(pipeline)
    arguments = to_start(pipeline, known, f"the schedule {cron} of {caller()}", from_words(assigned, known))
    scheduled = publisher.schedule(pipeline, cron, arguments)
    if as_json:
        print_json(scheduled)
    else:
        print_line(f"{_describe(scheduled)}.")


@app.command()
@options_of(server_settings)
def status(
    server: PipelineSettings,
    run_id: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Id of a run. [the newest runs and the schedules]")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, metavar="N")] = 10,
    as_json: JsonOption = False,
) -> None:
    """Show the steps of one run, or the newest runs and the schedules."""
    if run_id is not None:
        from evernear.kubeflow.client import KfpRuns

        runs = KfpRuns(server)
        selected = runs.show(run_id)
        show(selected, outcome_of(selected, runs), as_json)
        return
    from evernear.kubeflow.publish import Publisher

    publisher = Publisher(server)
    newest, schedules = publisher.runs.list(limit=limit), publisher.schedules()
    if as_json:
        print_json({"runs": newest, "schedules": schedules})
        return
    print_table(("run", "pipeline", "version", "state", "started (UTC)", "duration"), map(row, newest))
    for scheduled in schedules:
        print_line(f"{_describe(scheduled)}, {scheduled.state}.")


def _describe(scheduled: "Schedule") -> str:
    following = scheduled.next_run
    shown = f"; next run {following:%Y-%m-%d %H:%M:%S}, if the server's time zone is UTC" if following else ""
    version = f" {scheduled.pipeline_version}" if scheduled.pipeline_version else ""
    if not scheduled.is_newest:
        version += " (not the newest; create the schedule again to start that)"
    return f"{scheduled.pipeline}{version} runs at {scheduled.cron} (seconds first){shown}"


@app.command()
@options_of(server_settings)
def stop(
    server: PipelineSettings,
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run's id, as `evernear pipeline status` lists it.")],
) -> None:
    """Stop a run. The run's exit step still runs, and records who stopped the run."""
    from evernear.kubeflow.client import KfpRuns
    from evernear.kubeflow.runs import caller

    runs = KfpRuns(server)
    run = runs.show(run_id)
    if run.state.is_final:
        print_line(f"Run {run_id} has already ended: {run.state}.")
        return
    record = record_of(run, runs)
    try:
        if record is not None:
            record.save_stop(caller(), datetime.now(UTC))
    except StoreError:
        record = None
    runs.stop(run_id)
    note = "" if record else " The run's store is not writable from here, so its record will not show who stopped it."
    print_line(f"Run {run_id} is stopping.{note}")


def _new_key() -> str:
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
