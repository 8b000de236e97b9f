"""What the tasks of a pipeline get besides their inputs: keys, scratch space, resources, time limits and retries.

What KFP 2.17 makes of it, and what it cannot: docs/decisions/0016-reindex-and-rollback.md.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kfp import dsl, kubernetes

S3_KEYS = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION")
RUN = dsl.PIPELINE_JOB_ID_PLACEHOLDER
HOUR_S = 3600
DAY_S = 24 * HOUR_S
BACKOFF_S = 30
CONFIG = dsl.PipelineConfig(ttl_seconds_after_finished=7 * DAY_S, active_deadline_seconds=3 * DAY_S)
"""A run that hangs, unschedulable for one, ends after three days; a week after its end its pods go."""


class TaskPolicy(NamedTuple):
    """Time limit and retries of a step; no retries where another attempt would be wrong or useless."""

    timeout_s: int
    retries: int = 2
    reads_images: bool = False


POLICIES = {
    "ingest": TaskPolicy(12 * HOUR_S, reads_images=True),
    "validate": TaskPolicy(HOUR_S),
    "train": TaskPolicy(DAY_S, reads_images=True),
    "export": TaskPolicy(HOUR_S, reads_images=True),
    "reuse": TaskPolicy(HOUR_S),
    "embed": TaskPolicy(12 * HOUR_S, reads_images=True),
    "probe": TaskPolicy(DAY_S, reads_images=True),
    "index": TaskPolicy(4 * HOUR_S, retries=0),  # nothing but a computation
    "evaluate": TaskPolicy(4 * HOUR_S, reads_images=True),
    "gate": TaskPolicy(HOUR_S),
    "archive": TaskPolicy(HOUR_S, reads_images=True),
    "deploy": TaskPolicy(2 * HOUR_S, retries=0),  # a release that did not come up would be rolled out again
    "rollback": TaskPolicy(2 * HOUR_S, retries=0),  # the second one would take back the move before
    "promote": TaskPolicy(2 * HOUR_S, retries=0),  # as deploy
    "notify": TaskPolicy(HOUR_S // 6),
}


def configure_tasks(
    tasks: Iterable[dsl.PipelineTask],
    s3_secret: str,
    cpu: str,
    memory: str,
) -> None:
    """Give each task the keys of the store, CPU and memory limits, and its policy; keep it out of KFP's cache.

    KFP's cache cannot hit: each ingest makes a new artifact. What is expensive has checkpoints in evernear's store.
    """
    for task in tasks:
        task.set_caching_options(enable_caching=False)
        policy = POLICIES[task.name]
        kubernetes.use_secret_as_env(task, s3_secret, {key: key for key in S3_KEYS}, optional=True)
        kubernetes.set_timeout(task, policy.timeout_s)
        if policy.retries:
            # Argo counts this from the first attempt on, and ends an attempt that goes on for longer. KFP's own is 1 h.
            in_all_s = (policy.retries + 1) * (policy.timeout_s + BACKOFF_S * 2**policy.retries)
            task.set_retry(policy.retries, f"{BACKOFF_S}s", 2, f"{in_all_s}s")
        _hand_down(task, cpu, memory)
        task.set_cpu_limit(cpu).set_memory_limit(memory)


def mount_inference_token(task: dsl.PipelineTask, token_secret: str) -> None:
    """Give a task that proves a release the token that the release's server asks for, where there is one."""
    kubernetes.use_secret_as_env(task, token_secret, {"token": "EVERNEAR_TOKEN"}, optional=True)


def mount_scratch(tasks: Iterable[dsl.PipelineTask], claim: str) -> None:
    """Give those that read images a place where one step's copy of a shard serves the next."""
    for task in tasks:
        if POLICIES[task.name].reads_images:
            kubernetes.mount_pvc(task, claim, "/scratch")


def set_accelerator(tasks: Iterable[dsl.PipelineTask], accelerator: str, count: str) -> None:
    """Give each task ``count`` accelerators, "0" for none, of a resource such as nvidia.com/gpu."""
    for task in tasks:
        _hand_down(task, accelerator, count)
        task.set_accelerator_type(accelerator).set_accelerator_limit(count)


def _hand_down(task: dsl.PipelineTask, *parameters: str) -> None:
    """kfp 2.17 forgets to hand parameters of a limit to the group that the task stands in."""
    task.register_pipeline_channels(list(parameters))  # pyright: ignore[reportArgumentType] - at run time channels
