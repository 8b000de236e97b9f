"""The settings of a cluster: the serving Deployment, Kubeflow Pipelines and prices."""

from typing import Self

from pydantic import Field, model_validator

from evernear.settings.section import LocalPath, Section, ServerUrl

_CPU = r"^[0-9]+(\.[0-9]+|m)?$"
_MEMORY = r"^[0-9]+(\.[0-9]+)?([KMGT]i?)?$"
_CLUSTER = ("task_", "train_")


class KubernetesSettings(Section):
    """The serving Deployment that the deploy step rolls out for the ``kubernetes`` target. A
    PodTemplate with the Deployment's name adds everything else about the pods, such as GPUs,
    tolerations and pull secrets (docs/kubernetes.md)."""

    namespace: str = Field(
        default="evernear", pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", description="Namespace of the pods."
    )
    name: str = Field(
        default="evernear-serving",
        pattern=r"^[a-z]([a-z0-9-]{0,45}[a-z0-9])?$",
        description="Name of the Deployment, the Service and their other objects.",
    )
    image: str = Field(
        default="",
        pattern=r"^$|^[a-z0-9][A-Za-z0-9._:/-]*@sha256:[0-9a-f]{64}$",
        description="Serving image by digest, REF@sha256:...",
    )
    replicas_min: int = Field(default=2, ge=1, description="minReplicas of the HorizontalPodAutoscaler.")
    replicas_max: int = Field(default=4, ge=1, description="maxReplicas of the HorizontalPodAutoscaler.")
    cpu: str = Field(default="2", pattern=_CPU, description="CPU request and limit of a pod.")
    memory: str | None = Field(
        default=None,
        pattern=r"^[0-9]+[MG]i$",
        description="Memory request and limit of a pod. Default: what the release and the limits of serving.* need. A "
        "lower value is refused.",
    )
    query_secret: str = Field(
        default="",
        description="Secret with AWS_ variables that may write queries/ of the store. If empty, logged queries stay "
        "in their pod and drift is not detected. Needs Kubernetes 1.29.",
    )
    store_claim: str = Field(
        default="", description="PersistentVolumeClaim to mount for a store file:///path; unused with an object store."
    )
    token_secret: str = Field(
        default="",
        description="Secret whose key ``token`` inference requires; if empty, only the NetworkPolicy restricts access.",
    )
    client_namespaces: tuple[str, ...] = Field(
        default=("kubeflow",), description="Other namespaces whose pods may request predictions."
    )
    metrics_namespaces: tuple[str, ...] = Field(
        default=("monitoring",), description="Namespaces whose pods may read metrics."
    )
    egress_ports: tuple[int, ...] | None = Field(
        default=None,
        description="TCP ports that pods may connect to, besides DNS. Default: those of object stores (443 for HTTPS, "
        "8333 for SeaweedFS, 9000 for MinIO), or none with store_claim.",
    )
    rollout_timeout_s: int = Field(default=600, ge=1, description="Time for a rollout before it is reverted.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.replicas_max < self.replicas_min:
            raise ValueError(f"replicas_max is less than replicas_min, {self.replicas_min}")
        return self


class PipelineSettings(Section):
    """The Kubeflow Pipelines server.

    Credentials come from the environment: KFP_TOKEN (a bearer token) or KFP_COOKIES
    (``name=value; ...``, the cookies of a Dex or IAP session). If neither is set, a pod uses its
    service account's token for KFP. The settings from ``task_cpu`` on describe the cluster:
    `evernear pipeline upload` writes them into the pipelines.
    """

    endpoint: ServerUrl = Field(
        default="",
        description="URL of the KFP API; if empty, ml-pipeline.kubeflow of the cluster that this process runs in.",
    )
    namespace: str = Field(default="", description="The user's namespace, on a multi-user KFP.")
    ui_url: str = Field(default="", description="URL of the KFP UI, for links; if empty, the endpoint.")
    ca_file: LocalPath | None = Field(default=None, description="CA certificates (PEM) that verify the endpoint.")
    task_cpu: str = Field(default="2", pattern=_CPU, description="CPU limit of each step that does not train.")
    task_memory: str = Field(
        default="4G", pattern=_MEMORY, description="Memory limit of each step that does not train."
    )
    train_cpu: str = Field(default="4", pattern=_CPU, description="CPU limit of the steps that train.")
    train_memory: str = Field(default="8G", pattern=_MEMORY, description="Memory limit of the steps that train.")
    train_accelerator: str = Field(
        default="nvidia.com/gpu",
        pattern=r"^[a-z0-9]([a-z0-9./_-]*[A-Za-z0-9])?$",
        description="Kubernetes resource of the steps that train; a run's train_accelerators is the number of them.",
    )

    @property
    def cluster(self) -> dict[str, str]:
        """What `pipeline upload` writes into the compiled pipelines."""
        return self.model_dump(include={name for name in type(self).model_fields if name.startswith(_CLUSTER)})


class CostSettings(Section):
    """Prices for the [cost of a run](run-page.md#cost). The defaults are AWS Fargate's on-demand
    prices in us-east-1 for Linux/x86."""

    currency: str = Field(default="USD", max_length=8, description="Currency of the prices.")
    cpu_hour: float = Field(default=0.04048, ge=0.0, description="Price of a CPU for an hour.")
    memory_gib_hour: float = Field(default=0.004445, ge=0.0, description="Price of 1 GiB of memory for an hour.")
    gpu_hour: float = Field(
        default=0.0, ge=0.0, description="Price of a GPU for an hour; 0: unknown, and so is the cost of steps with one."
    )
