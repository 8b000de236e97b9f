"""``evernear labels``: look for wrong labels in the source."""

from datetime import UTC, datetime

import typer

from evernear.cli.options import JsonOption, run_settings, with_options
from evernear.cli.tables import print_table
from evernear.output import print_json, print_line
from evernear.settings import Settings

app = typer.Typer(rich_markup_mode="markdown", no_args_is_help=True, help="Look for wrong labels in the source.")
_PRINTED = 10


@app.command()
@with_options(settings=run_settings)
def check(settings: Settings, as_json: JsonOption = False) -> None:
    """List images of the ingested source whose label looks wrong, for `evernear review`.

    Trains twice, each time on half of the images and as briefly as the probe, because a network that was trained on an
    image has fitted its label.
    """
    from evernear.review.suspects import check_labels
    from evernear.store import open_store

    result = check_labels(open_store(settings.store_uri), settings, datetime.now(UTC))
    if as_json:
        print_json(result.model_dump(mode="json"))
        return
    print_line(f"{result.found:,} of {result.images:,} labels look wrong.")
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
        print_line("Next: evernear review    a person relabels or keeps them")
