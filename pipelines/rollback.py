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
    serving_image: str = "",
    settings: dict[str, Any] = {},
    store: str = "s3://evernear",
    task_cpu: str = "2",
    task_memory: str = "4G",
    task_s3_secret: str = "evernear-s3",
    task_token_secret: str = "evernear-token",
):
    """Deploy the previous champion again, then notify.

    Args:
        release: Fail unless this is the champion; not checked if empty.
        reason: Reason for the history and the notification.
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
        "rollback",
        roll_back_champion,
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
