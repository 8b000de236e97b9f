"""``evernear dataset``: export a dataset from the store to files that other tools can
open."""

import sys
from functools import partial
from typing import Annotated

import typer

from evernear.cli.interrupts import message_on_interrupt
from evernear.cli.options import ConfigOption, JsonOption, SetOption, WorkdirOption
from evernear.cli.parts import INTERRUPTED, output_uri, parts_progress
from evernear.cli.releases import StoreOption, registry_settings
from evernear.common.output import print_json, print_line, quantity
from evernear.data.export import Format
from evernear.errors import SettingsError

app = typer.Typer(
    rich_markup_mode="markdown", no_args_is_help=True, help="Export datasets as files that other tools open."
)
MAX_PROCESSES = 8


@app.callback()
def _group() -> None:  # pyright: ignore[reportUnusedFunction] - with one command, typer would leave out its name
    """A group."""


@app.command()
def export(
    form: Annotated[Format, typer.Option("--format", help="What to write.")],
    out: Annotated[str, typer.Option("--out", metavar="DIR|s3://...", help="Where the files go.")],
    snapshot: Annotated[
        str | None,
        typer.Option("--snapshot", metavar="DIGEST", help="A snapshot, or the start of its digest. [newest]"),
    ] = None,
    release: Annotated[
        str | None,
        typer.Option("--release", metavar="VERSION", help="Export the embeddings of a release, and its snapshot."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="[one for each CPU, at most 8; 1 with --release]")
    ] = None,
    as_json: JsonOption = False,
    store: StoreOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
) -> None:
    """Export a dataset snapshot: images, labels, splits, digests, groups and, with
    --release, the embeddings of that release.

    Run the same command again to continue an interrupted export.
    """
    from evernear.common.run_parts import Processes, run_parts
    from evernear.common.store import open_store
    from evernear.common.threads import available_cpus
    from evernear.data.export.plan import Export, plan_export
    from evernear.release.export_dataset import open_worker, select_snapshot

    settings = registry_settings(store, config, overrides, workdir)
    opened, output = open_store(settings.store_uri), open_store(output_uri(out))
    manifest = select_snapshot(opened, settings.data.dataset, snapshot, release)
    if form == "folder" and release:
        raise SettingsError(
            "Folders have no place for embeddings; use another --format, or "
            f"--snapshot {manifest.digest[:12]} instead of --release."
        )
    chosen = Export(
        format=form,
        store_uri=settings.store_uri,
        dataset=manifest.name,
        digest=manifest.digest,
        release=release or "",
        groups=bool(manifest.groups) and form != "folder",
    )
    if manifest.groups and form == "folder":
        print_line("The folders do not name the images' groups; --format parquet and webdataset do.", sys.stderr)
    count = processes or (1 if release else min(MAX_PROCESSES, available_cpus()))
    with message_on_interrupt(INTERRUPTED):
        parts = plan_export(chosen, manifest, output)
        described = f"{quantity(parts.plan.units, 'image')} of {manifest.name}, snapshot {manifest.digest[:12]},"
        print_line(f"Exporting {described} to {output.uri}.", sys.stderr)
        worker = partial(open_worker, store_uri=settings.store_uri)  # the store may have moved since the plan
        run_parts(parts, Processes(count, worker), parts_progress())
    if as_json:
        print_json({"out": output.uri, **chosen.model_dump(exclude={"store_uri"}), "images": parts.plan.units})
    else:
        print_line(f"{described} as {form} in {output.uri}.")
