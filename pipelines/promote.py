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
    serving_image: str = "",
    settings: dict[str, Any] = {},
    store: str = "s3://evernear",
    task_cpu: str = "2",
    task_memory: str = "4G",
    task_s3_secret: str = "evernear-s3",
    task_token_secret: str = "evernear-token",
):
    """Deploy a release of the registry, even against its verdict, or apply settings to the champion, then notify.

    Args:
        release: Version of the release; empty: the champion stays, and gets the settings (target kubernetes).
        reason: Reason for the history and the notification; required with a release.
        started_by: Who or what starts the run, for the champion's history.
        target: Where the champion runs: registry (publish only), kubernetes (a Deployment), local (this machine).
        serving_image: Image of the serving pods by digest, REF@sha256:...; required for target kubernetes.
        settings: Other settings to change, such as {"kubernetes": {"replicas_min": 3}}.
        store: Object store of the releases: s3://bucket/prefix or file:///path.
        task_cpu: CPU limit of each step.
        task_memory: Memory limit of each step.
        task_s3_secret: Secret with the keys of the store, AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID ...
        task_token_secret: Secret whose key token is the inference token, if kubernetes.token_secret names one.
    """
    move_champion(
        "promote",
        promote_release,
        store,
        limits=(task_cpu, task_memory),
        secrets=(task_s3_secret, task_token_secret),
        target=target,
        serving_image=serving_image,
        settings=settings,
        release=release,
        reason=reason,
        started_by=started_by,
    )
