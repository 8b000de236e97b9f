"""The pipelines that move the champion: promote a release, or roll back to the previous one."""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from components.notify import notify
from components.promote import promote as promote_release
from components.rollback import rollback as roll_back_champion
from pipelines.tasks import CONFIG, RUN, configure_tasks, mount_inference_token


def _pipeline(name: str, description: str, move: Callable[..., dsl.PipelineTask]) -> Any:
    """A pipeline of the step ``move``, which proves that the release answers before it becomes the champion."""

    @dsl.pipeline(name=name, display_name=name.capitalize(), description=description, pipeline_config=CONFIG)  # pyright: ignore[reportUntypedFunctionDecorator]
    def pipeline(
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
        """Move the champion, then notify.

        Args:
            release: Promote: version of the release, required. Rollback: fail unless this is the champion.
            reason: Reason for the history and the notification. Promote requires it.
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
        notified = notify(run=RUN, store=store, pipeline=name)
        with dsl.ExitHandler(notified, name="move the champion"):
            moved = move(
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
        mount_inference_token((moved,), task_token_secret)

    return pipeline


promote = _pipeline("promote", "Deploys a release of the registry, even against its verdict.", promote_release)
rollback = _pipeline("rollback", "Deploys the previous champion again.", roll_back_champion)
