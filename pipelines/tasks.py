"""Kubernetes settings of the tasks: Secrets, scratch space, resources and timeouts.

`evernear.kubeflow.publish` replaces the limits and the accelerator with those of the cluster.
How KFP 2.17 compiles them, and its limits: docs/decisions/0015-a-run-starts-once.md.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kfp import dsl, kubernetes

S3_SECRET, TASK_CPU, TASK_MEMORY = "evernear-s3", "2", "4G"
TRAIN_CPU, TRAIN_MEMORY, TRAIN_ACCELERATOR = "4", "8G", "nvidia.com/gpu"
S3_KEYS = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
)
"""Keys of the Secret, which may all be absent: a pod whose ServiceAccount has a role needs none."""
MILVUS_SECRET, MILVUS_KEYS = "evernear-milvus", ("EVERNEAR_MILVUS_URI", "EVERNEAR_MILVUS_TOKEN")
TOKEN_SECRET, SCRATCH_CLAIM = "evernear-token", "evernear-scratch"
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
"""Time limit of a step whose parts may run on several nodes: an hour more than `indexed_job.TIMEOUT_S`."""
CONFIG = dsl.PipelineConfig(ttl_seconds_after_finished=7 * DAY_S, active_deadline_seconds=3 * DAY_S)
"""A run that hangs (an unschedulable pod, for example) ends after three days. Pods are deleted after a week."""


class TaskPolicy(NamedTuple):
    """Timeout of a task, and what it needs."""

    timeout_s: int
    reads_images: bool = False
    queries_release: bool = False
    searches_gallery: bool = False
    trains: bool = False


POLICIES = {
    "ingest": TaskPolicy(PARTS_S, reads_images=True, searches_gallery=True),
    "validate": TaskPolicy(HOUR_S),
    "train": TaskPolicy(DAY_S, reads_images=True, trains=True),
    "export": TaskPolicy(HOUR_S, reads_images=True),
    "reuse": TaskPolicy(HOUR_S),
    "embed": TaskPolicy(PARTS_S, reads_images=True),
    "probe": TaskPolicy(DAY_S, reads_images=True, trains=True),
    "index": TaskPolicy(4 * HOUR_S, searches_gallery=True),  # pure computation
    "evaluate": TaskPolicy(PARTS_S, reads_images=True, searches_gallery=True),
    "gate": TaskPolicy(HOUR_S),
    "archive": TaskPolicy(HOUR_S, reads_images=True, searches_gallery=True),
    "deploy": TaskPolicy(2 * HOUR_S, queries_release=True, searches_gallery=True),
    "rollback": TaskPolicy(2 * HOUR_S, queries_release=True, searches_gallery=True),
    "promote": TaskPolicy(2 * HOUR_S, queries_release=True, searches_gallery=True),
    "predict": TaskPolicy(PARTS_S, searches_gallery=True),
    "notify": TaskPolicy(HOUR_S // 2, searches_gallery=True),  # more than it may wait for the store; sets Milvus' alias
}


def configure_tasks(tasks: Iterable[dsl.PipelineTask], accelerators: str = "") -> None:
    """Set the image, the Secrets, the scratch volume, the limits and the policy of each task, and disable KFP's cache.

    Tasks that train get more CPUs and memory, and ``accelerators``, which is their number as text ("0": none).

    Each task receives the name of its image, so the pods that it starts run the same code.

    The cache can never hit because each ingest makes a new artifact. Expensive steps keep checkpoints in the store.
    """
    for task in tasks:
        assert task.container_spec is not None  # noqa: S101 - the task is a component
        task.set_env_variable(IMAGE_VARIABLE, task.container_spec.image)
        task.set_caching_options(enable_caching=False)
        policy = POLICIES[task.name]
        kubernetes.use_secret_as_env(task, S3_SECRET, {key: key for key in S3_KEYS}, optional=True)
        if policy.searches_gallery:  # the gallery may be in Milvus
            kubernetes.use_secret_as_env(task, MILVUS_SECRET, {key: key for key in MILVUS_KEYS}, optional=True)
        if policy.queries_release:
            kubernetes.use_secret_as_env(task, TOKEN_SECRET, {"token": "EVERNEAR_TOKEN"}, optional=True)
        if task.name == "notify":
            kubernetes.use_secret_as_env(task, TRACKING_SECRET, {key: key for key in TRACKING_KEYS}, optional=True)
        kubernetes.set_timeout(task, policy.timeout_s)
        if policy.reads_images:
            kubernetes.mount_pvc(task, SCRATCH_CLAIM, "/scratch")
        _set_limits(task, accelerators if policy.trains else "")


def _set_limits(task: dsl.PipelineTask, accelerators: str) -> None:
    if not accelerators:
        task.set_cpu_limit(TASK_CPU).set_memory_limit(TASK_MEMORY)
        return
    task.set_cpu_limit(TRAIN_CPU).set_memory_limit(TRAIN_MEMORY)
    # kfp 2.17 does not pass the parameter of a limit to the group that contains the task.
    task.register_pipeline_channels([accelerators])  # pyright: ignore[reportArgumentType] - a channel at run time
    task.set_accelerator_type(TRAIN_ACCELERATOR).set_accelerator_limit(accelerators)
