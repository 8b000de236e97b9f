"""Settings of the servers: TorchServe, the preprocessing server and the Kubernetes Deployment."""

from typing import Literal, Self

from pydantic import Field, model_validator

from evernear.settings.section import Host, PixelLimit, Port, Section


class ServingSettings(Section):
    """TorchServe. ``batch_size`` to ``max_pixels`` are stored in the release."""

    model_name: str = Field(
        default="embedding", pattern=r"^[a-z][a-z0-9-]{0,62}$", description="Name of the model in URLs."
    )
    host: Host = Field(default="127.0.0.1", description="Address to bind.")
    inference_port: Port = Field(default=8080, description="Predictions over REST.")
    management_port: Port = Field(default=8081, description="Management over REST, always on loopback.")
    metrics_port: Port = Field(default=8082, description="Prometheus metrics.")
    grpc_inference_port: Port = Field(default=7070, description="Predictions over gRPC.")
    grpc_management_port: Port = Field(default=7071, description="Management over gRPC, always on loopback.")
    workers: int = Field(default=1, ge=1, le=256, description="Processes that recognize images.")
    threads: int = Field(
        default=1, ge=1, le=256, description="Threads of each worker; workers times threads should match the cores."
    )
    batch_size: int = Field(default=32, ge=1, le=1024, description="Largest number of requests in a batch.")
    max_batch_delay_ms: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="Longest wait for a full batch, if the previous batch had several requests.",
    )
    queue_size: int = Field(default=512, ge=1, description="Requests that may wait; further ones get 503.")
    response_timeout_s: int = Field(
        default=30, ge=1, description="Time for a batch; a worker that takes longer is replaced."
    )
    startup_timeout_s: int = Field(default=120, ge=1, description="Time for a release to become ready.")
    drain_timeout_s: int = Field(default=30, ge=0, description="Time to finish in-flight requests at shutdown.")
    endpoint_removal_s: int = Field(default=10, ge=0, description="preStop delay while the endpoint is removed.")
    model_api: bool = Field(
        default=True,
        description="Allow models to be registered on the running server, as deployments do. If false, the server "
        "serves the models in its model store at startup.",
    )
    max_request_size_bytes: int = Field(default=6_553_500, ge=1024, description="Larger requests get 413.")
    max_pixels: PixelLimit = Field(
        default=25_000_000, description="Largest width times height of an image; larger images get 400."
    )
    heap_size_bytes: int = Field(
        default=512 * 2**20,
        ge=128 * 2**20,
        description="Java heap of TorchServe. Requests in flight may use a quarter of it; further ones get 503.",
    )
    keep_registered: int = Field(default=3, ge=1, description="Releases that stay registered, for a fast rollback.")
    smoke_queries: int = Field(
        default=8,
        ge=1,
        le=64,
        description="Largest number of stored queries that a release must answer before it goes live.",
    )
    query_log: Literal["off", "figures", "images"] = Field(
        default="figures", description="What to log of sampled live queries, from which the watcher computes drift."
    )
    query_log_sample: int = Field(
        default=100, ge=1, le=10_000, description="Queries that each worker samples in a period."
    )
    query_log_period_s: float = Field(default=300.0, gt=0.0, description="Time between two log files of a worker.")
    query_log_size_bytes: int = Field(
        default=64 * 2**20, ge=2**20, description="Log files buffered on this machine; the oldest are dropped first."
    )

    @model_validator(mode="after")
    def _request_fits_the_heap(self) -> Self:
        if self.max_request_size_bytes > self.heap_size_bytes // 4:
            raise ValueError(
                f"max_request_size_bytes is {self.max_request_size_bytes}; it can be at most a quarter of "
                f"heap_size_bytes, {self.heap_size_bytes // 4}"
            )
        return self


class PrepSettings(Section):
    """The preprocessing server in front of the predictor."""

    host: Host = Field(default="127.0.0.1", description="Address to bind.")
    port: Port = Field(default=8090, description="Port of the HTTP API.")
    predictor_host: Host = Field(
        default="", description="Host of TorchServe's gRPC API; if empty, the server of the working directory."
    )
    predictor_fallback_host: Host = Field(
        default="", description="Host to call if no address of ``predictor_host`` answers, such as a ClusterIP Service."
    )
    predictor_tls: bool = Field(default=False, description="Use TLS to both hosts.")
    timeout_s: float = Field(default=10.0, gt=0.0, description="Time for a request, including queueing and retries.")
    attempts: int = Field(
        default=4, ge=1, le=5, description="Attempts to reach the predictor for a request; gRPC allows 5."
    )
    in_flight: int = Field(default=64, ge=1, description="Concurrent requests to the predictor; others wait.")
    max_request_size_bytes: int = Field(
        default=10 * 2**20, ge=1024, description="Largest JSON body. Base64 makes an image a third larger."
    )
    max_bodies_size_bytes: int = Field(
        default=64 * 2**20, ge=1024, description="Total size of the bodies in flight; further requests get 503."
    )
    upload_timeout_s: float = Field(default=10.0, gt=0.0, description="Time limit for receiving the body of a request.")
    large_decodes: int = Field(
        default=1, ge=1, description="Images of more than a megapixel to decode concurrently; each needs memory."
    )

    @model_validator(mode="after")
    def _one_body_fits(self) -> Self:
        if self.max_bodies_size_bytes < self.max_request_size_bytes:
            raise ValueError("max_bodies_size_bytes is smaller than max_request_size_bytes, a single body")
        return self


class KubernetesSettings(Section):
    """The serving Deployment that the deploy step rolls out, for target ``kubernetes``."""

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
    cpu_target_percent: int = Field(
        default=70, ge=1, le=100, description="Target CPU utilization of the HorizontalPodAutoscaler."
    )
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
    failure_grace_s: int = Field(
        default=60,
        ge=1,
        description="Time before an error that rarely resolves itself (image pull, crash loop) ends a rollout.",
    )
    convergence_timeout_s: int = Field(
        default=60, ge=1, description="Time after a rollout until only the new release answers at the Service."
    )
    lease_s: int = Field(default=30, ge=1, description="leaseDurationSeconds of the deployment lock.")
    force_conflicts: bool = Field(
        default=False, description="Take ownership of fields that another manager set in the cluster."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.replicas_max < self.replicas_min:
            raise ValueError(f"replicas_max is less than replicas_min, {self.replicas_min}")
        return self
