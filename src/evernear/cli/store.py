"""``evernear store``: check and repair the object store, and delete unneeded objects."""

import sys
from typing import Annotated

import typer

from evernear.cli.options import JsonOption, options_of
from evernear.cli.releases import registry_settings
from evernear.common.output import print_json, print_line, print_table, quantity
from evernear.errors import IntegrityError
from evernear.settings import Settings

app = typer.Typer(
    name="store", rich_markup_mode="markdown", no_args_is_help=True, help="Check, repair and prune the object store."
)


@app.command()
@options_of(registry_settings)
def check(
    settings: Settings,
    repair: Annotated[
        bool, typer.Option("--repair", help="Forget what is damaged, so that the next run reads it again.")
    ] = False,
    source: Annotated[
        str | None,
        typer.Option(
            "--source", help="Where the images are now, to name those that are gone. [where they were ingested from]"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read and hash every object that a release, a dataset or the champion needs, and report
    damaged objects."""
    from evernear.common.store import open_store
    from evernear.maintenance.check import check_store
    from evernear.maintenance.check import repair as repair_store
    from evernear.settings import DataSettings
    from evernear.settings.sources import parse

    opened = open_store(settings.store_uri)
    if repair:
        chosen = {**settings.data.model_dump(), **({"source": source} if source else {})}
        found = repair_store(opened, parse(DataSettings, chosen), moved=source is not None)
    else:
        found = check_store(opened)
    if as_json:
        print_json(found)
    else:
        for damage in found:
            print_line(f"{'repaired' if damage.repaired else 'DAMAGED':<8} {damage.key}")
            print_line(f"  {damage.reason} Needed by {', '.join(damage.needed_by)}.")
            for sentence in filter(None, (damage.repaired, damage.consequence)):
                print_line(f"  {sentence}")
        print_line(f"{opened.uri}: {quantity(len(found), 'object')} missing or damaged." if found else "Intact.")
    if any(damage.consequence for damage in found):
        if not repair:
            print_line("Repair it with `evernear store check --repair`.", sys.stderr)
        raise typer.Exit(IntegrityError.exit_code)


@app.command()
@options_of(registry_settings)
def prune(
    settings: Settings,
    keep: Annotated[
        int, typer.Option("--keep", min=1, metavar="N", help="Number of newest releases, and of newest runs, to keep.")
    ] = 10,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go, and why.")] = False,
    ended: Annotated[
        list[str] | None,
        typer.Option("--ended", metavar="RUN", help="A run on another machine that was killed; repeatable."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Delete unneeded objects: old releases (except the champion, its parent and the target of a
    rollback), and snapshots, shards, embeddings, checkpoints, parts and run records to which
    nothing refers. The command refuses to run while a run is in progress."""
    from evernear.common.store import open_store
    from evernear.maintenance.prune import prune_store, surplus

    opened = open_store(settings.store_uri)
    pruning = surplus(opened, keep) if dry_run else prune_store(opened, keep, ended or ())
    if as_json:
        print_json(pruning)
        return
    rows = [(f"{group.size_bytes:,}", f"{len(group.keys):,}", group.what, group.why) for group in pruning.surplus]
    if rows:
        print_table(("bytes", "objects", "what", "why"), rows)
    for sentence in pruning.kept:
        print_line(f"WARNING: {sentence}", sys.stderr)
    if pruning.releases:
        print_line(f"{'Would remove' if dry_run else 'Removed'} {', '.join(pruning.releases)}.")
    print_line(f"{opened.uri}: {'would delete' if dry_run else 'deleted'} {pruning}.")
