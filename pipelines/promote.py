"""Promote: a release of the registry becomes the champion."""

from typing import Any

from kfp import dsl

from components.promote import promote as promote_release
from pipelines.champion import move_champion
from pipelines.tasks import CONFIG


@dsl.pipeline(  # pyright: ignore[reportUntypedFunctionDecorator]
    name="promote",
    display_name="Promote",
    description="Deploys a release of the registry, even against its verdict, or applies settings to the champion.",
    pipeline_config=CONFIG,
)
def promote(
    release: str = "",
    reason: str = "",
    started_by: str = "",
    target: str = "registry",
    settings: dict[str, Any] = {},
    store: str = "s3://evernear",
):
    """Deploy a release of the registry, even against its verdict, or apply settings to the champion, then notify.

    Args:
        release: Version of the release; empty: the champion stays, and gets the settings (target kubernetes).
        reason: Reason for the history and the notification; required with a release.
        started_by: Who or what starts the run, for the champion's history.
        target: Where the champion runs: registry (publish only), kubernetes (a Deployment), local (this machine).
        settings: Other settings, such as {"kubernetes": {"image": "REF@sha256:..."}}, which target kubernetes requires.
        store: Object store of the releases: s3://bucket/prefix or file:///path.
    """
    move_champion(
        "promote",
        promote_release,
        store,
        target=target,
        settings=settings,
        release=release,
        reason=reason,
        started_by=started_by,
    )
