"""Makes the previous champion live again, once it has proved that it answers."""

from typing import Any

from kfp import dsl

from components.notify import notify
from components.rollback import rollback as restore
from pipelines.tasks import CONFIG, RUN, configure_tasks, mount_inference_token


@dsl.pipeline(  # pyright: ignore[reportUntypedFunctionDecorator]
    name="rollback",
    display_name="Rollback",
    description="Makes the previous champion live again, once it has proved that it answers.",
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
    """Take the champion's last move back. Always notify.

    Args:
        release: Release to roll back; fails if another one is live by then. Empty: whatever is live.
        reason: The reason, for the history and for whoever is notified.
        started_by: Who wants it, for the champion's history.
        target: Where it serves: registry (the pointer alone), kubernetes (a Deployment), local (this machine).
        serving_image: Image of the serving pods by digest, REF@sha256:...; required for target kubernetes.
        settings: Other settings to change, such as {"kubernetes": {"replicas_min": 3}}.
        store: Object store of the releases: s3://bucket/prefix or file:///path.
        task_cpu: CPU limit of each step.
        task_memory: Memory limit of each step.
        task_s3_secret: Secret with the keys of the store, AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID ...
        task_token_secret: Secret whose key token is the inference token, if kubernetes.token_secret names one.
    """
    notified = notify(run=RUN, store=store, pipeline="rollback")
    with dsl.ExitHandler(notified, name="back to the previous champion"):
        moved = restore(
            run=RUN,
            store=store,
            target=target,
            serving_image=serving_image,
            settings=settings,
            release=release,
            reason=reason,
            started_by=started_by,
        )

    configure_tasks((notified, moved), task_s3_secret, task_cpu, task_memory)
    mount_inference_token(moved, task_token_secret)
