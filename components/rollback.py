"""The previous champion -> the champion again."""

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
    """Deploy the previous champion again, after it has answered its stored queries."""
    from evernear import steps

    parameters = {"target": target, "serving_image": serving_image}
    steps.rollback(run, store, parameters, settings, release, reason, started_by)
