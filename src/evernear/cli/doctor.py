"""``evernear doctor``: whether what evernear depends on is there and lets it do its work."""

from typing import Annotated, cast

import typer

from evernear.cli.options import JsonOption, local_settings, with_options
from evernear.output import print_json, print_line
from evernear.settings import Settings


@with_options(settings=local_settings)
def doctor(
    settings: Settings,
    parts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PART]...", help="store, cluster, pipelines, slack [those that are configured]"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Try object store, cluster, Kubeflow Pipelines and Slack, and say what is missing and how to mend it."""
    from evernear.doctor import PARTS, Part, configured, examine
    from evernear.errors import SettingsError

    for part in parts or ():
        if part not in PARTS:
            raise SettingsError(f"There is no part {part!r} to look at; known: {', '.join(PARTS)}.")
    ill = False
    for found in examine(settings, cast("list[Part]", parts) or configured(settings)):
        ill = ill or not found.well
        if as_json:
            print_json(found)
        else:
            print_line(f"{'ok ' if found.well else 'ILL'} {found.part:<10} {found.message}")
    if ill:
        raise typer.Exit(1)
