"""The previous champion -> what serves again."""

from typing import Any

from components import component


@component
def rollback(
    run: str,
    store: str,
    target: str,
    serving_image: str,
    settings: dict[str, Any],
    release: str,
    reason: str,
    started_by: str,
):
    """Make the previous champion live again, once it has proved that it answers."""
    from evernear import steps

    steps.rollback(run, store, target, serving_image, settings, release, reason, started_by)
