import sys
from typing import Annotated

import typer

from evernear.cli.options import JsonOption, options_of
from evernear.cli.releases import registry_settings
from evernear.common.output import print_json, print_line, quantity
from evernear.settings import Settings


@options_of(registry_settings)
def forget(
    settings: Settings,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, the command only lists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete images from snapshots, releases, caches, run pages and the query log if the source no
    longer has them."""
    from evernear.common.store import open_store
    from evernear.deployment import forget_releases
    from evernear.maintenance.forget import find
    from evernear.maintenance.forget import forget_images as delete_images

    opened = open_store(settings.store_uri)
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
    if yes:
        print_line("Deleted. Run directories and artifacts of Kubeflow Pipelines may have copies.")
    elif forgotten.champion:
        print_line("Nothing can be deleted: the champion is affected. Train and promote a release without the images.")
    else:
        print_line("Nothing was deleted. Add --yes to delete all of this.")
