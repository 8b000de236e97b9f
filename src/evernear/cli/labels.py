"""``evernear labels``: search for wrong labels, and import labels of live queries."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from evernear.cli.options import JsonOption, options_of, run_settings
from evernear.cli.releases import registry_settings
from evernear.common.output import print_json, print_line, print_table, quantity
from evernear.settings import Settings
from evernear.settings.layers import command_for

app = typer.Typer(
    name="labels",
    rich_markup_mode="markdown",
    no_args_is_help=True,
    help="Look for wrong labels, and import those of live queries.",
)
_PRINTED = 10


@app.command()
@options_of(run_settings)
def check(
    settings: Settings,
    as_json: JsonOption = False,
) -> None:
    """Search the ingested source for images whose label looks wrong, and list them for
    `evernear console`.

    The command trains two networks, each on half of the images and as briefly as the probe. A
    network is not used for the images that it was trained on, because the network has fitted the
    labels of those images.
    """
    from evernear.common.store import open_store
    from evernear.console.suspects import check_labels

    result = check_labels(open_store(settings.store_uri), settings, datetime.now(UTC))
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


@app.command(name="import")
@options_of(registry_settings)
def import_(
    settings: Settings,
    file: Annotated[Path, typer.Argument(metavar="FILE.csv", help="CSV file with the columns id and label.")],
) -> None:
    """Import true labels of live queries and print each release's weekly accuracy.

    The id is the `id` of the server's response. A later row for an id corrects an earlier one, in
    the file and in the store, so a growing file can be imported again. These labels measure
    accuracy and do not enter the dataset.
    """
    from evernear.common.store import open_store
    from evernear.console.live_labels import import_labels, labeled_queries, read_labels
    from evernear.evaluation.live_accuracy import accuracy_by_week

    opened = open_store(settings.store_uri)
    read = read_labels(file)
    result = import_labels(opened, read.labels, datetime.now(UTC))
    print_line(f"{result.stored:,} of {quantity(len(read.labels), 'label')} stored.")
    if read.corrected:
        print_line(f"Several labels in the file, of which the last one counts: {_some(read.corrected)}")
    for count, column in ((read.without_label, "label"), (read.without_id, "id")):
        if count:
            print_line(f"{quantity(count, 'row')} left out: no {column}.")
    if result.missing:
        print_line(
            f"{quantity(len(result.missing), 'id')} not in the query log, which has a sample of the queries: "
            f"{_some(result.missing)}"
        )
    if result.unknown_classes:
        print_line(f"No class of the release, so its answer counts as wrong: {_some(result.unknown_classes)}")
    in_store = labeled_queries(opened)
    for sentence in in_store.damaged.values():
        print_line(sentence, sys.stderr)
    weeks = accuracy_by_week(in_store.queries)
    rows = [[each.week, each.version, f"{each.accuracy.total:,}", str(each.accuracy)] for each in weeks]
    if rows:
        print_table(["week", "release", "labels", "accuracy (95% interval)"], rows)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_PRINTED]) + (" ..." if len(names) > _PRINTED else "")
