"""The previous champion -> the champion again."""

from typing import Any

from components import component


@component
def rollback(
    run: str,
    store: str,
    target: str,
    settings: dict[str, Any],
    release: str,
    reason: str,
    started_by: str,
):
    """Deploy the previous champion again, after it has answered its stored queries."""
    from evernear import steps

    steps.rollback(run, store, target, settings, release, reason, started_by)
