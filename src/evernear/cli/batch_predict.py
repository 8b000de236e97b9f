"""``evernear batch-predict``: recognize all images of a source, without a server."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from evernear.cli.interrupts import message_on_interrupt
from evernear.cli.options import JsonOption, ReleaseOption, options_of
from evernear.cli.parts import INTERRUPTED, output_uri, parts_progress
from evernear.cli.releases import registry_settings
from evernear.common.output import print_json, print_line, quantity
from evernear.errors import SettingsError
from evernear.settings import DataSettings, Settings, parse

if TYPE_CHECKING:
    from evernear.common.run_parts import Executor

MAX_PROCESSES = 8
CPUS_PER_PROCESS = 4


@options_of(registry_settings)
def batch_predict(
    settings: Settings,
    source: Annotated[
        str, typer.Option("--source", help="folder:DIR | s3://bucket/prefix; images at any depth, without classes.")
    ],
    out: Annotated[str, typer.Option("--out", metavar="DIR|s3://...", help="Where the Parquet files go.")],
    release: ReleaseOption = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="Each loads the release. [one for 4 CPUs, at most 8]")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=1, help="Pods of an Indexed Job instead of processes here; see parts_job.*."),
    ] = None,
    part_images: Annotated[
        int | None,
        typer.Option("--part-images", min=1, help="Images of one Parquet file; a killed part is repeated. [5000]"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Use a release to recognize all images in a folder or bucket, without a server.

    Each part is a Parquet file with the columns path, digest (sha256 of the file), label, distance,
    unknown, neighbors, version and error. Run the same command again to continue.
    """
    from evernear.common.run_parts import run_parts
    from evernear.common.store import open_store
    from evernear.data.sources import require_outside
    from evernear.release.registry import Registry
    from evernear.serving.batch import PART_IMAGES, Shared, plan_predictions, summarize

    registry = Registry(open_store(settings.store_uri))
    shared = Shared(
        source=_absolute(source),
        store_uri=settings.store_uri,
        version=registry.get(release).manifest.version if release else registry.require_champion().version,
        part_images=part_images or PART_IMAGES,
    )
    output = open_store(output_uri(out))
    require_outside(output, settings.data.source)
    executor = _executor(settings, processes, nodes, shared.source, settings.store_uri, output.uri)
    with message_on_interrupt(INTERRUPTED):
        parts = plan_predictions(shared, output)
        for note in parts.plan.notes:
            print_line(note, sys.stderr)
        images = quantity(parts.plan.units, "image")
        print_line(f"{images} in {shared.source}, listed {parts.plan.planned:%Y-%m-%d %H:%M} UTC.", sys.stderr)
        run_parts(parts, executor, parts_progress())
    summary = summarize(parts)
    if as_json:
        print_json({"out": output.uri, "version": shared.version, **summary.model_dump()})
    else:
        print_line(f"{summary.predicted()} by {shared.version} in {output.uri}.")
    if left_out := summary.left_out():
        print_line(f"{left_out}.", sys.stderr)
    summary.require_predictions(shared.source)


def _executor(settings: Settings, processes: int | None, nodes: int | None, *uris: str) -> "Executor":
    """Processes here or, if ``nodes`` is set, an Indexed Job whose pods can read all ``uris``."""
    if nodes is None:
        from evernear.common.processes import available_cpus
        from evernear.common.run_parts import Processes
        from evernear.serving.batch import open_worker

        return Processes(processes or min(MAX_PROCESSES, max(1, available_cpus() // CPUS_PER_PROCESS)), open_worker)
    from evernear.kubeflow.indexed_job import IndexedJob, require_shared

    if processes:
        raise SettingsError("--processes and --nodes exclude each other: a pod of --nodes runs one process.")
    for uri, what in zip(uris, ("the source", "the store of the release", "the output"), strict=True):
        require_shared(uri, what)
    return IndexedJob(nodes, settings.parts_job, settings.kubernetes, lambda text: print_line(text, sys.stderr))


def _absolute(source: str) -> str:
    """Make a path absolute, as in `data.source`, so that any directory can continue the command."""
    if not source:
        raise SettingsError("--source is empty; name folder:DIRECTORY or s3://bucket/prefix.")
    return parse(DataSettings, {"source": source}).source
