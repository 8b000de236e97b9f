"""A release of the registry -> what serves, because a person decided so."""

from typing import Any

from components import component


@component
def promote(
    run: str,
    store: str,
    target: str,
    serving_image: str,
    settings: dict[str, Any],
    release: str,
    reason: str,
    started_by: str,
):
    """Make a release of the registry live, even against its verdict, once it has proved that it answers."""
    from evernear import steps

    steps.promote(run, store, target, serving_image, settings, release, reason, started_by)
