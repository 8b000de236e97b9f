from typing import Annotated, cast

import typer

from evernear.cli.options import JsonOption, local_settings, options_of
from evernear.common.output import print_json, print_line
from evernear.settings import Settings


@options_of(local_settings)
def doctor(
    settings: Settings,
    parts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PART]...", help="store, cluster, pipelines or slack. [the configured ones]"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check the object store, the cluster, Kubeflow Pipelines and Slack. Report each problem with
    its remedy."""
    from evernear.cli.checks import PARTS, Part, check, configured
    from evernear.errors import SettingsError

    for part in parts or ():
        if part not in PARTS:
            raise SettingsError(f"Unknown part {part!r}; known: {', '.join(PARTS)}.")
    failed = False
    for finding in check(settings, cast("list[Part]", parts) or configured(settings)):
        failed = failed or not finding.ok
        if as_json:
            print_json(finding)
        else:
            print_line(f"{'ok  ' if finding.ok else 'FAIL'} {finding.part:<10} {finding.message}")
    if failed:
        raise typer.Exit(1)
