"""What the tasks of a pipeline get besides their inputs: keys, scratch space, resources, time and second chances.

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


class Terms(NamedTuple):
    """What a step is granted; no ``retries`` where trying again would be wrong or of no use."""

    timeout_s: int
    retries: int = 2
    reads_images: bool = False


TERMS = {
    "ingest": Terms(12 * HOUR_S, reads_images=True),
    "validate": Terms(HOUR_S),
    "train": Terms(DAY_S, reads_images=True),
    "export": Terms(HOUR_S, reads_images=True),
    "reuse": Terms(HOUR_S),
    "embed": Terms(12 * HOUR_S, reads_images=True),
    "probe": Terms(DAY_S, reads_images=True),
    "index": Terms(4 * HOUR_S, retries=0),  # nothing but a computation
    "evaluate": Terms(4 * HOUR_S, reads_images=True),
    "gate": Terms(HOUR_S),
    "archive": Terms(HOUR_S, reads_images=True),
    "deploy": Terms(2 * HOUR_S, retries=0),  # a release that did not come up would be rolled out again
    "rollback": Terms(2 * HOUR_S, retries=0),  # the second one would take back the move before
    "promote": Terms(2 * HOUR_S, retries=0),  # as deploy
    "notify": Terms(HOUR_S // 6),
}


def fresh(task: dsl.PipelineTask) -> dsl.PipelineTask:
    """Never from KFP's cache: the task looks at the world (a source, the champion, a cluster), not just at inputs."""
    return task.set_caching_options(enable_caching=False)


def equip(
    tasks: Iterable[dsl.PipelineTask],
    s3_secret: str,
    cpu: str,
    memory: str,
) -> None:
    """Give each task the keys of the store, bounds of CPU and memory, and its `TERMS`."""
    for task in tasks:
        terms = TERMS[task.name]
        kubernetes.use_secret_as_env(task, s3_secret, {key: key for key in S3_KEYS}, optional=True)
        kubernetes.set_timeout(task, terms.timeout_s)
        if terms.retries:
            # Argo counts this from the first attempt on, and ends an attempt that goes on for longer. KFP's own is 1 h.
            in_all_s = (terms.retries + 1) * (terms.timeout_s + BACKOFF_S * 2**terms.retries)
            task.set_retry(terms.retries, f"{BACKOFF_S}s", 2, f"{in_all_s}s")
        _hand_down(task, cpu, memory)
        task.set_cpu_limit(cpu).set_memory_limit(memory)


def let_predict(task: dsl.PipelineTask, token_secret: str) -> None:
    """Give a task that proves a release the token that the release's server asks for, where there is one."""
    kubernetes.use_secret_as_env(task, token_secret, {"token": "EVERNEAR_TOKEN"}, optional=True)


def mount_scratch(tasks: Iterable[dsl.PipelineTask], claim: str) -> None:
    """Give those that read images a place where one step's copy of a shard serves the next."""
    for task in tasks:
        if TERMS[task.name].reads_images:
            kubernetes.mount_pvc(task, claim, "/scratch")


def accelerate(tasks: Iterable[dsl.PipelineTask], accelerator: str, count: str) -> None:
    """Give each task ``count`` accelerators, "0" for none, of a resource such as nvidia.com/gpu."""
    for task in tasks:
        _hand_down(task, accelerator, count)
        task.set_accelerator_type(accelerator).set_accelerator_limit(count)


def _hand_down(task: dsl.PipelineTask, *parameters: str) -> None:
    """kfp 2.17 forgets to hand parameters of a limit to the group that the task stands in."""
    task.register_pipeline_channels(list(parameters))
