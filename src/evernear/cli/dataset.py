"""``evernear dataset``: export a dataset from the store to files that other tools can open."""

import sys
from typing import Annotated, Literal

import typer

from evernear.cli.options import JsonOption, options_of
from evernear.cli.parts import output_uri
from evernear.cli.releases import registry_settings
from evernear.common.output import print_json, print_line, quantity
from evernear.errors import SettingsError
from evernear.settings import Settings

app = typer.Typer(
    name="dataset",
    rich_markup_mode="markdown",
    no_args_is_help=True,
    help="Export datasets as files that other tools open.",
)


@app.callback()
def _group() -> None:  # pyright: ignore[reportUnusedFunction] - with one command, typer would leave out its name
    """A group."""


@app.command()
@options_of(registry_settings)
def export(
    settings: Settings,
    form: Annotated[Literal["parquet", "webdataset", "folder"], typer.Option("--format", help="What to write.")],
    out: Annotated[str, typer.Option("--out", metavar="DIR|s3://...", help="Where the files go.")],
    snapshot: Annotated[
        str | None,
        typer.Option("--snapshot", metavar="DIGEST", help="A snapshot, or the start of its digest. [newest]"),
    ] = None,
    release: Annotated[
        str | None,
        typer.Option("--release", metavar="VERSION", help="Export the embeddings of a release, and its snapshot."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Export a dataset snapshot: images, labels, splits, digests, groups and, with
    --release, the embeddings of that release.

    If the command is killed, run it again. It writes the same files.
    """
    from evernear.common.progress import Countdown
    from evernear.common.store import open_store
    from evernear.data.sources import require_outside
    from evernear.release.export_dataset import export_snapshot, select_snapshot

    opened, output = open_store(settings.store_uri), open_store(output_uri(out))
    manifest = select_snapshot(opened, settings.data.dataset, snapshot, release)
    require_outside(output, settings.data.source, manifest.source)
    if form == "folder" and release:
        raise SettingsError(
            "Folders have no place for embeddings; use another --format, or "
            f"--snapshot {manifest.digest[:12]} instead of --release."
        )
    if manifest.groups and form == "folder":
        print_line("The folders do not name the images' groups; --format parquet and webdataset do.", sys.stderr)
    total = sum(shard.count for shard in manifest.shards)
    described = f"{quantity(total, 'image')} of {manifest.name}, snapshot {manifest.digest[:12]},"
    print_line(f"Exporting {described} to {output.uri}.", sys.stderr)
    countdown = Countdown(lambda text: print_line(text, sys.stderr))
    export_snapshot(
        opened, manifest, output, form, release, lambda done: countdown(done, total, f"{done:,} of {total:,} images")
    )
    if as_json:
        fields = {"format": form, "dataset": manifest.name, "digest": manifest.digest, "release": release or ""}
        print_json({"out": output.uri, **fields, "images": total})
    else:
        print_line(f"{described} as {form} in {output.uri}.")
