"""Kubernetes settings of the tasks: Secrets, scratch space, resources, timeouts and retries.

How KFP 2.17 compiles them, and its limits: docs/decisions/0015-a-run-starts-once.md.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kfp import dsl, kubernetes

S3_KEYS = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION")
MILVUS_SECRET, MILVUS_KEYS = "evernear-milvus", ("EVERNEAR_MILVUS_URI", "EVERNEAR_MILVUS_TOKEN")
TRACKING_SECRET = "evernear-tracking"  # noqa: S105 - the name of a Secret
TRACKING_KEYS = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MODEL_REGISTRY_BASE_URL",
)
IMAGE_VARIABLE = "EVERNEAR_IMAGE"
RUN = dsl.PIPELINE_JOB_ID_PLACEHOLDER
HOUR_S = 3600
DAY_S = 24 * HOUR_S
PARTS_S = DAY_S
"""Time limit of a step whose parts may run on several nodes: an hour more than parts_job.timeout_s."""
BACKOFF_S = 30
CONFIG = dsl.PipelineConfig(ttl_seconds_after_finished=7 * DAY_S, active_deadline_seconds=3 * DAY_S)
"""A run that hangs (an unschedulable pod, for example) ends after three days. Pods are deleted after a week."""


class TaskPolicy(NamedTuple):
    """Timeout and retries of a task."""

    timeout_s: int
    retries: int = 2
    reads_images: bool = False
    queries_release: bool = False
    searches_gallery: bool = False


POLICIES = {
    "ingest": TaskPolicy(PARTS_S, reads_images=True, searches_gallery=True),
    "validate": TaskPolicy(HOUR_S),
    "train": TaskPolicy(DAY_S, reads_images=True),
    "export": TaskPolicy(HOUR_S, reads_images=True),
    "reuse": TaskPolicy(HOUR_S),
    "embed": TaskPolicy(PARTS_S, reads_images=True),
    "probe": TaskPolicy(DAY_S, reads_images=True),
    "index": TaskPolicy(4 * HOUR_S, retries=0, searches_gallery=True),  # pure computation
    "evaluate": TaskPolicy(PARTS_S, reads_images=True, searches_gallery=True),
    "gate": TaskPolicy(HOUR_S),
    "archive": TaskPolicy(HOUR_S, reads_images=True, searches_gallery=True),
    # A retry would roll out a failed release again, or roll back one more release.
    "deploy": TaskPolicy(2 * HOUR_S, retries=0, queries_release=True, searches_gallery=True),
    "rollback": TaskPolicy(2 * HOUR_S, retries=0, queries_release=True, searches_gallery=True),
    "promote": TaskPolicy(2 * HOUR_S, retries=0, queries_release=True, searches_gallery=True),
    "predict": TaskPolicy(PARTS_S, searches_gallery=True),
    "notify": TaskPolicy(HOUR_S // 6),
}


def configure_tasks(tasks: Iterable[dsl.PipelineTask], s3_secret: str, cpu: str, memory: str) -> None:
    """Set the image, the Secrets, the CPU and memory limits and the policy of each task, and disable KFP's cache.

    Each task receives the name of its image, so the pods that it starts run the same code.

    The cache can never hit because each ingest makes a new artifact. Expensive steps keep checkpoints in the store.
    """
    for task in tasks:
        assert task.container_spec is not None  # noqa: S101 - the task is a component
        task.set_env_variable(IMAGE_VARIABLE, task.container_spec.image)
        task.set_caching_options(enable_caching=False)
        policy = POLICIES[task.name]
        kubernetes.use_secret_as_env(task, s3_secret, {key: key for key in S3_KEYS}, optional=True)
        if policy.searches_gallery:  # the gallery may be in Milvus
            kubernetes.use_secret_as_env(task, MILVUS_SECRET, {key: key for key in MILVUS_KEYS}, optional=True)
        if task.name == "notify":
            kubernetes.use_secret_as_env(task, TRACKING_SECRET, {key: key for key in TRACKING_KEYS}, optional=True)
        kubernetes.set_timeout(task, policy.timeout_s)
        if policy.retries:
            # Argo measures this from the first attempt, and stops an attempt that exceeds it. KFP's default is 1 h.
            in_all_s = (policy.retries + 1) * (policy.timeout_s + BACKOFF_S * 2**policy.retries)
            task.set_retry(policy.retries, f"{BACKOFF_S}s", 2, f"{in_all_s}s")
        _pass_to_group(task, cpu, memory)
        task.set_cpu_limit(cpu).set_memory_limit(memory)


def mount_inference_token(tasks: Iterable[dsl.PipelineTask], token_secret: str) -> None:
    """Give the tasks that query a deployed release its bearer token, if the Secret exists."""
    for task in tasks:
        if POLICIES[task.name].queries_release:
            kubernetes.use_secret_as_env(task, token_secret, {"token": "EVERNEAR_TOKEN"}, optional=True)


def mount_scratch(tasks: Iterable[dsl.PipelineTask], claim: str) -> None:
    """Mount a volume where steps share their copies of the shards."""
    for task in tasks:
        if POLICIES[task.name].reads_images:
            kubernetes.mount_pvc(task, claim, "/scratch")


def set_accelerator(tasks: Iterable[dsl.PipelineTask], accelerator: str, count: str) -> None:
    """Request ``count`` accelerators ("0": none) of a resource such as nvidia.com/gpu."""
    for task in tasks:
        _pass_to_group(task, accelerator, count)
        task.set_accelerator_type(accelerator).set_accelerator_limit(count)


def _pass_to_group(task: dsl.PipelineTask, *parameters: str) -> None:
    """Work around kfp 2.17, which does not pass parameters of a limit to the group that contains the task."""
    task.register_pipeline_channels(list(parameters))  # pyright: ignore[reportArgumentType] - channels at run time
