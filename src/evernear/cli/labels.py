"""``evernear labels``: look for wrong labels; ``evernear review``: the local page."""

import secrets
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evernear.cli.interrupts import message_on_interrupt
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
from evernear.common.output import print_json, print_line, print_secret, print_table, quantity
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
    """List images of the ingested source whose label looks wrong, for `evernear review`.

    Trains twice, each time on half of the images and as briefly as the probe, because a network that was trained on an
    image has fitted its label.
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
    """Import a CSV file with the true labels of live queries, and print the accuracy of each release by week.

    Raises:
        DataError: the file is unusable; nothing is stored.
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
    labels_in_store = labeled_queries(store)
    for sentence in labels_in_store.damaged.values():
        print_line(sentence, sys.stderr)
    weeks = accuracy_by_week(labels_in_store.queries)
    rows = [[each.week, each.version, f"{each.accuracy.total:,}", str(each.accuracy)] for each in weeks]
    if rows:
        print_table(["week", "release", "labels", "accuracy (95% interval)"], rows)


PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 chooses a free one.")]


def review(
    port: PortOption = 8095,
    source: SourceOption = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    retire: RetireOption = None,
    rename: RenameOption = None,
) -> None:
    """Serve a page on this machine in which a person labels uncertain live queries and corrects suspect labels."""
    from evernear.common.store import open_store
    from evernear.release.registry import whoami
    from evernear.review.answers import Answers, open_label_target
    from evernear.review.page import create_review_app, serve_review
    from evernear.review.suspects import load_suspects

    settings = run_settings(source, preset, config, overrides, workdir, retire, rename)
    store, target = open_store(settings.store_uri), open_label_target(settings.data.source, settings.data)
    answers = Answers(store, target)
    answers.recover()
    for sentence in answers.set_aside.values():
        print_line(sentence)
    suspects = load_suspects(store, settings.data.source)
    token = secrets.token_urlsafe(24)
    again = command_for(settings.workdir, "review")
    with message_on_interrupt(f"Interrupted. Every answer is stored; `{again}` continues with the queue."):
        app = create_review_app(store, answers, target, token, whoami(), suspects)
        serve_review(app, port, lambda bound: print_secret(f"Open http://127.0.0.1:{bound}/?token={token}"))
