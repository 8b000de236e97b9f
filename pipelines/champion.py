"""The common part of `promote` and `rollback`: one step moves the champion, then the outcome is recorded."""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from components.notify import notify
from pipelines.tasks import RUN, configure_tasks, mount_inference_token


def move_champion(
    pipeline: str,
    move: Callable[..., dsl.PipelineTask],
    store: str,
    *,
    limits: tuple[str, str],
    secrets: tuple[str, str],
    **parameters: Any,
) -> None:
    """Add the step ``move``, which verifies that the release answers before it becomes the champion, and notify.

    ``limits`` are CPU and memory of each step, ``secrets`` the names of the Secrets of the store and of the inference
    token, and ``parameters`` the step's.
    """
    notified = notify(run=RUN, store=store, pipeline=pipeline)
    with dsl.ExitHandler(notified, name="move the champion"):
        moved = move(run=RUN, store=store, **parameters)
    s3_secret, token_secret = secrets
    configure_tasks((notified, moved), s3_secret, *limits)
    mount_inference_token((moved,), token_secret)
