"""Rollback: the previous champion becomes the champion again."""

from typing import Any

from kfp import dsl

from components.rollback import rollback as roll_back_champion
from pipelines.champion import move_champion
from pipelines.tasks import CONFIG


@dsl.pipeline(  # pyright: ignore[reportUntypedFunctionDecorator]
    name="rollback",
    display_name="Rollback",
    description="Deploys the previous champion again.",
    pipeline_config=CONFIG,
)
def rollback(
    release: str = "",
    reason: str = "",
    started_by: str = "",
    target: str = "registry",
    settings: dict[str, Any] = {},
    store: str = "s3://evernear",
):
    """Deploy the previous champion again, then notify.

    Args:
        release: Fail unless this is the champion; not checked if empty.
        reason: Reason for the history and the notification.
        started_by: Who or what starts the run, for the champion's history.
        target: Where the champion runs: registry (publish only), kubernetes (a Deployment), local (this machine).
        settings: Other settings, such as {"kubernetes": {"image": "REF@sha256:..."}}, which target kubernetes requires.
        store: Object store of the releases: s3://bucket/prefix or file:///path.
    """
    move_champion(
        "rollback",
        roll_back_champion,
        store,
        target=target,
        settings=settings,
        release=release,
        reason=reason,
        started_by=started_by,
    )
