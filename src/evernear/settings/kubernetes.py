from typing import Self

from pydantic import Field, model_validator

from evernear.settings.section import Section


class KubernetesSettings(Section):
    """The serving Deployment that the deploy step rolls out for the ``kubernetes`` target."""

    namespace: str = Field(
        default="evernear", pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", description="Namespace of the pods."
    )
    context: str = Field(
        default="",
        description="Context of the kubeconfig; if empty, the pod's service account, else the current context.",
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
    image_pull_secrets: tuple[str, ...] = Field(default=(), description="Secrets for a private image registry.")
    replicas_min: int = Field(default=2, ge=1, description="minReplicas of the HorizontalPodAutoscaler.")
    replicas_max: int = Field(default=4, ge=1, description="maxReplicas of the HorizontalPodAutoscaler.")
    cpu: str = Field(default="2", pattern=r"^[0-9]+(\.[0-9]+|m)?$", description="CPU request and limit of a pod.")
    memory: str = Field(
        default="auto",
        pattern=r"^(auto|[0-9]+[MG]i)$",
        description="Memory request and limit of a pod; auto: from the release and the limits of serving.*. A lower "
        "value than that is refused.",
    )
    gpus: int = Field(default=0, ge=0, description="GPUs of a pod (nvidia.com/gpu).")
    node_selector: dict[str, str] = Field(default={}, description="Labels of the nodes that may run the pods.")
    tolerations: tuple[dict[str, str | int], ...] = Field(default=(), description="Tolerations of the pods.")
    s3_secret: str = Field(
        default="evernear-s3-reader",
        description="Secret with the AWS_ variables of the init container that downloads the release.",
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
    milvus_secret: str = Field(
        default="",
        description="Secret with EVERNEAR_MILVUS_URI and EVERNEAR_MILVUS_TOKEN, for a gallery in Milvus; also add the "
        "port to egress_ports.",
    )
    otlp_endpoint: str = Field(
        default="",
        description="OpenTelemetry collector (OTLP over HTTP) for traces of predictions, such as "
        "http://collector.monitoring:4318; if empty, none. Also add the port to egress_ports.",
    )
    client_namespaces: tuple[str, ...] = Field(
        default=("kubeflow",), description="Other namespaces whose pods may request predictions."
    )
    metrics_namespaces: tuple[str, ...] = Field(
        default=("monitoring",), description="Namespaces whose pods may read metrics."
    )
    egress_ports: tuple[int, ...] = Field(
        default=(443, 8333, 9000),
        description="TCP ports that pods may connect to for the object store: HTTPS, SeaweedFS, MinIO.",
    )
    service_url: str = Field(
        default="",
        pattern=r"^$|^https?://[^/\s]+$",
        description="URL of the Service for the deploy step; if empty, its DNS name or the API server's proxy.",
    )
    rollout_timeout_s: int = Field(default=600, ge=1, description="Time for a rollout before it is reverted.")
    force_conflicts: bool = Field(
        default=False, description="Take ownership of fields that another manager set in the cluster."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.replicas_max < self.replicas_min:
            raise ValueError(f"replicas_max is less than replicas_min, {self.replicas_min}")
        return self
