"""``evernear labels``: search for wrong labels."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from evernear.cli.options import (
    ConfigOption,
    JsonOption,
    PresetOption,
    RenameOption,
    RetireOption,
    SetOption,
    SourceOption,
    WorkdirOption,
    run_settings,
)
from evernear.common.output import print_json, print_line, print_table, quantity
from evernear.settings.layers import command_for

if TYPE_CHECKING:
    from evernear.common.store import Store

app = typer.Typer(
    rich_markup_mode="markdown", no_args_is_help=True, help="Look for wrong labels, and exchange them with other tools."
)
_PRINTED = 10


@app.command()
def check(
    as_json: JsonOption = False,
    source: SourceOption = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    retire: RetireOption = None,
    rename: RenameOption = None,
) -> None:
    """Search the ingested source for images whose label looks wrong, and list them for
    `evernear review`.

    The command trains two networks, each on half of the images and as briefly as the
    probe. A network is not used for the images that it was trained on, because the
    network has fitted the labels of those images.
    """
    from evernear.common.store import open_store
    from evernear.review.suspects import check_labels

    settings = run_settings(source, preset, config, overrides, workdir, retire, rename)
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
        print_line(f"Next: {command_for(settings.workdir, 'review')}    a person relabels or keeps them")


def import_live_labels(store: "Store", file: Path) -> None:
    """Import a CSV file with the true labels of live queries,
    and print the weekly accuracy of each release.

    Raises:
        DataError: the file is unusable. Nothing is stored.
    """
    from evernear.evaluation.live_accuracy import accuracy_by_week
    from evernear.review.live_labels import import_labels, labeled_queries, read_labels

    labels = read_labels(file)
    result = import_labels(store, labels, datetime.now(UTC))
    print_line(f"{result.stored:,} of {quantity(len(labels), 'label')} stored.")
    if result.missing:
        print_line(
            f"{quantity(len(result.missing), 'id')} not in the query log, which has a sample of the queries: "
            f"{', '.join(result.missing[:_PRINTED])}{' ...' if len(result.missing) > _PRINTED else ''}"
        )
    if result.unknown_classes:
        print_line(
            "No class of the release, so its answer counts as wrong: "
            f"{', '.join(result.unknown_classes[:_PRINTED])}{' ...' if len(result.unknown_classes) > _PRINTED else ''}"
        )
    labels_in_store = labeled_queries(store)
    for sentence in labels_in_store.damaged.values():
        print_line(sentence, sys.stderr)
    weeks = accuracy_by_week(labels_in_store.queries)
    rows = [[each.week, each.version, f"{each.accuracy.total:,}", str(each.accuracy)] for each in weeks]
    if rows:
        print_table(["week", "release", "labels", "accuracy (95% interval)"], rows)
