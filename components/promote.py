"""A release of the registry -> the champion, by a person's decision."""

from typing import Any

from components import component


@component
def promote(
    run: str,
    store: str,
    target: str,
    settings: dict[str, Any],
    release: str,
    reason: str,
    started_by: str,
):
    """Deploy a release of the registry, even against its verdict, or apply settings to the champion, after it has
    answered its stored queries.
    """
    from evernear import steps

    steps.promote(run, store, target, settings, release, reason, started_by)
