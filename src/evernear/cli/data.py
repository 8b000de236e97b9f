"""``evernear dataset``, ``labels``, ``store`` and ``forget``: what is in the object store."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from evernear.cli.options import JsonOption, OutOption, group, options_of, output_uri, registry_settings, run_settings
from evernear.common.output import print_json, print_line, print_table, quantity
from evernear.errors import IntegrityError, SettingsError
from evernear.settings import DataSettings, Settings, parse
from evernear.settings.layers import command_for

dataset_app = group("dataset", "Export datasets as files that other tools open.")


@dataset_app.command()
@options_of(registry_settings)
def export(
    settings: Settings,
    form: Annotated[Literal["parquet", "webdataset", "folder"], typer.Option("--format", help="What to write.")],
    out: OutOption,
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
    from evernear.common.store.current import current_store
    from evernear.data.sources import require_outside
    from evernear.release.export_dataset import export_snapshot, select_snapshot

    opened, output = current_store(settings.store_uri), open_store(output_uri(out))
    manifest = select_snapshot(opened, settings.data.dataset, snapshot, release)
    require_outside(output, settings.data.source, manifest.source, store_uri=opened.uri)
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


labels_app = group("labels", "Look for wrong labels, and import those of live queries.")
_PRINTED = 10


@labels_app.command(name="check")
@options_of(run_settings)
def check_labels(
    settings: Settings,
    as_json: JsonOption = False,
) -> None:
    """Search the ingested source for images whose label looks wrong, and list them for
    `evernear console`.

    The command trains two networks, each on half of the images and as briefly as the probe. A
    network is not used for the images that it was trained on, because the network has fitted the
    labels of those images.
    """
    from evernear.common.store.current import current_store
    from evernear.reporting.countdowns import Trainings
    from evernear.review import suspects

    dataset = suspects.newest_dataset(current_store(settings.store_uri), settings)
    print_line("Two networks are trained, which takes about as long as the probe of a run.", sys.stderr)
    networks = Trainings("network", lambda line: print_line(line, sys.stderr))
    result = suspects.check_labels(dataset, settings, datetime.now(UTC), networks.on_step, networks.on_training)
    if as_json:
        print_json(result.model_dump(mode="json"))
        return
    print_line(f"{result.found:,} of {quantity(result.images, 'label')} suspected to be wrong.")
    rows = [
        [
            suspect.files[0],
            suspect.label,
            suspect.suggested,
            suspect.duplicate and f"duplicate {suspect.duplicate}",
        ]
        for suspect in result.suspects[:_PRINTED]
    ]
    if rows:
        print_table(["file", "label", "looks like", ""], rows)
        print_line(f"Next: {command_for(settings.workdir, 'console')}    a person relabels or keeps them")


@labels_app.command(name="import")
@options_of(registry_settings)
def import_(
    settings: Settings,
    file: Annotated[Path, typer.Argument(metavar="FILE.csv", help="CSV file with the columns id and label.")],
) -> None:
    """Import true labels of live queries and print each release's weekly answers.

    The id is the `id` of the server's response. A later row for an id corrects an earlier one, in
    the file and in the store, so a growing file can be imported again. These labels measure
    the release and do not enter the dataset.
    """
    from evernear.common.store.current import current_store
    from evernear.evaluation.live_accuracy import accuracy_by_week
    from evernear.review.live_labels import import_labels, labeled_queries, read_labels
    from evernear.serving.configuration import logged_queries
    from evernear.serving.endpoints import home_of
    from evernear.serving.query_log import ship_query_log
    from evernear.serving.torchserve import is_running

    opened, home = current_store(settings.store_uri), home_of(settings.workdir)
    read = read_labels(file)
    is_of_server = not settings.store and home.is_dir()
    if is_of_server:
        ship_query_log(logged_queries(home), opened)
    result = import_labels(opened, read.labels, datetime.now(UTC), keep_corrections=True)
    print_line(f"{result.stored:,} of {quantity(len(read.labels), 'label')} stored.")
    if read.corrected:
        print_line(f"Several labels in the file, of which the last one counts: {_some(read.corrected)}")
    for count, column in ((read.without_label, "label"), (read.without_id, "id")):
        if count:
            print_line(f"{quantity(count, 'row')} left out: no {column}.")
    if result.missing:
        why = _why_missing(is_sample=result.is_sample, is_written=is_of_server and not is_running(home))
        print_line(f"{quantity(len(result.missing), 'id')} not in the query log{why}: {_some(result.missing)}")
    if result.unknown_classes:
        print_line(f"No class of the release, so its answer counts as wrong: {_some(result.unknown_classes)}")
    in_store = labeled_queries(opened)
    for sentence in in_store.damaged.values():
        print_line(sentence, sys.stderr)
    weeks = accuracy_by_week(in_store.queries)
    rows = [[each.week, each.version, each.counts, str(each.label_right)] for each in weeks]
    if rows:
        print_table(["week", "release", "answers", "label right (95% interval)"], rows)


def _why_missing(*, is_sample: bool, is_written: bool) -> str:
    """``is_written``: no server may have queries that are not in the log yet."""
    from evernear.serving.configuration import QUERY_LOG_PERIOD_S

    if is_written:
        return ", which has a sample of the queries" if is_sample else ""
    pending = f"not written yet (every {QUERY_LOG_PERIOD_S:g} s, and when a server stops; import the file again)"
    return f": not in its sample of the queries, or {pending}" if is_sample else f": {pending}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_PRINTED]) + (" ..." if len(names) > _PRINTED else "")


store_app = group("store", "Check, repair and prune the object store.")


@store_app.command()
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
    from evernear.common.store.current import current_store
    from evernear.maintenance.check import check_store
    from evernear.maintenance.check import repair as repair_store

    opened = current_store(settings.store_uri)
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
        repaired = sum(bool(damage.repaired) for damage in found)
        end = f", {repaired:,} repaired." if repair else "."
        print_line(f"{opened.uri}: {quantity(len(found), 'object')} missing or damaged{end}" if found else "Intact.")
    if any(damage.consequence for damage in found):
        if not repair and any(damage.is_repairable for damage in found):
            print_line("Repair it with `evernear store check --repair`.", sys.stderr)
        raise typer.Exit(IntegrityError.exit_code)


@store_app.command()
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
    from evernear.common.store.current import current_store
    from evernear.maintenance.prune import prune_store, surplus

    opened = current_store(settings.store_uri)
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


@options_of(registry_settings)
def forget(
    settings: Settings,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, the command only lists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete images from snapshots, releases, caches, run pages and the query log if the source no
    longer has them."""
    from evernear.common.store.current import current_store
    from evernear.deployment import forget_releases
    from evernear.maintenance.forget import find
    from evernear.maintenance.forget import forget_images as delete_images

    opened = current_store(settings.store_uri)
    forgotten = delete_images(opened) if yes else find(opened)
    if yes:
        forget_releases(settings)
    if forgotten.unreadable:
        print_line(
            f"WARNING: {quantity(len(forgotten.unreadable), 'object')} cannot be read, so it is unknown whether they "
            "are affected. `evernear store check --repair` repairs the records of releases; delete other objects by "
            "hand. Then repeat this command.",
            sys.stderr,
        )
    if as_json:
        print_json(forgotten)
        return
    for name, value in forgotten.model_dump().items():
        text = ", ".join(value) if isinstance(value, tuple) else value
        print_line(f"{name.replace('_', ' '):<12} {'-' if text in ('', None) else text}")
    if forgotten.anchor and not forgotten.champion:
        print_line(
            f"The champion {'is now' if yes else 'becomes'} the anchor, which the gate compares candidates with: "
            f"{forgotten.anchor}, the anchor until now, is deleted."
        )
    if not any(forgotten.model_dump(exclude={"unreadable"}).values()):
        print_line(
            "Nothing to delete: the newest snapshot of each dataset has all images of the earlier ones. If you deleted"
            " files from the source, run the whole pipeline with `evernear run` first."
        )
    elif yes:
        print_line("Deleted. Run directories and artifacts of Kubeflow Pipelines may have copies.")
    elif forgotten.champion:
        print_line("Nothing can be deleted: the champion is affected. Train and promote a release without the images.")
    else:
        print_line("Nothing was deleted. Add --yes to delete all of this.")
