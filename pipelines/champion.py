"""The common part of `promote` and `rollback`: one step moves the champion, then the outcome is recorded."""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from components.notify import notify
from pipelines.tasks import RUN, configure_tasks


def move_champion(pipeline: str, move: Callable[..., dsl.PipelineTask], store: str, **parameters: Any) -> None:
    """Add the step ``move``, which verifies that the release answers before it becomes the champion, and notify.

    ``parameters`` are the step's.
    """
    notified = notify(run=RUN, store=store, pipeline=pipeline)
    with dsl.ExitHandler(notified, name="move the champion"):
        moved = move(run=RUN, store=store, **parameters)
    configure_tasks((notified, moved))
