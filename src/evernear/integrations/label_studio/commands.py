"""The commands ``evernear labels export`` and ``evernear labels import``, which
exchange tasks and annotations with Label Studio.
"""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from evernear.cli.options import (
    ConfigOption,
    PresetOption,
    RenameOption,
    RetireOption,
    SetOption,
    SourceOption,
    WorkdirOption,
    run_settings,
)
from evernear.common.disk import disk_errors, write_atomically
from evernear.common.output import print_line, quantity
from evernear.errors import DataError

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="JSON file of Label Studio.")]
_EXPORTED = 1000


def export(
    file: FileArgument,
    source: SourceOption = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    retire: RetireOption = None,
    rename: RenameOption = None,
) -> None:
    """Write the review queue, the suspect labels and random live queries as Label
    Studio tasks.

    Its labeling config is FILE.xml.
    """
    from evernear.common.store import open_store
    from evernear.integrations.label_studio.tasks import labeling_config, to_tasks
    from evernear.release.registry import Registry
    from evernear.review.answers import Answers
    from evernear.review.label_target import open_label_target
    from evernear.review.queue import Queue
    from evernear.review.random_queries import RandomQueries
    from evernear.review.suspects import load_suspects, picture

    settings = run_settings(source, preset, config, overrides, workdir, retire, rename)
    store, target = open_store(settings.store_uri), open_label_target(settings.data.source, settings.data)
    answered = Answers(store, target).latest()
    suspects = (each for each in load_suspects(store, settings.data.source) if each.image not in answered)
    pictures = ((each, picture(target.read, each.files[0])) for each in suspects)
    items = Queue(store).pending(answered.keys(), _EXPORTED)
    champion = Registry(store).champion()
    pending = RandomQueries(store).this_week(champion.version, datetime.now(UTC)).pending if champion else []
    tasks = to_tasks(items, [(each, png) for each, png in pictures if png], pending)
    write_atomically(file, json.dumps(tasks).encode())
    config = file.with_suffix(".xml")
    write_atomically(config, labeling_config(target.labels).encode())
    print_line(f"{quantity(len(tasks), 'task')} in {file}, the labeling config of the project in {config}.")


def import_(
    file: FileArgument,
    source: SourceOption = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    retire: RetireOption = None,
    rename: RenameOption = None,
) -> None:
    """Record the annotations in a Label Studio JSON export as review answers.

    A CSV file with the columns id and label contains the true labels of live queries
    instead. The id is the ``id`` of the server's response. These labels measure
    accuracy and do not enter the dataset.
    """
    from evernear.cli.labels import import_live_labels
    from evernear.common.store import open_store
    from evernear.integrations.label_studio.tasks import import_tasks
    from evernear.review.answers import Answers
    from evernear.review.label_target import open_label_target
    from evernear.review.queue import Queue
    from evernear.review.suspects import load_suspects

    settings = run_settings(source, preset, config, overrides, workdir, retire, rename)
    store = open_store(settings.store_uri)
    if file.suffix.lower() in (".csv", ".tsv"):
        import_live_labels(store, file)
        return
    target = open_label_target(settings.data.source, settings.data)
    with disk_errors(file):
        data = file.read_bytes()
    suspects = load_suspects(store, settings.data.source)
    answers = Answers(store, target)
    outcomes, refusals = import_tasks(data, answers, Queue(store), suspects, datetime.now(UTC), store)
    for sentence in (*answers.set_aside.values(), *refusals):
        print_line(sentence, sys.stderr)
    print_line(f"Tasks: {', '.join(f'{count} {outcome}' for outcome, count in outcomes.items())}.")
    if refusals:
        raise typer.Exit(DataError.exit_code)
