"""Every knob of evernear, in one place: frozen pydantic models, one per room.

Read in this order, later ones winning: the defaults below, ``--preset``, ``--config FILE`` (TOML), the
environment (``EVERNEAR_TRAIN__EPOCHS=3``), ``--set train.epochs=3``. An unknown key is an error that names the
nearest known one. Secrets are no settings: S3 keys come from ``AWS_ACCESS_KEY_ID`` / ``AWS_SECRET_ACCESS_KEY``,
a remote server's token from ``EVERNEAR_TOKEN`` or the file that ``EVERNEAR_TOKEN_FILE`` names.
"""

import difflib
import json
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from evernear.errors import SettingsError

ENV_PREFIX = "EVERNEAR_"
TESTS_PREFIX = "EVERNEAR_TEST_"
"""Variables that opt in to tests, which reach every process that a test starts."""
TOKEN_VARIABLE = "EVERNEAR_TOKEN"  # noqa: S105 - a name, no token
TOKEN_FILE_VARIABLE = "EVERNEAR_TOKEN_FILE"  # noqa: S105
Model = TypeVar("Model", bound=BaseModel)
Severity = Literal["error", "warn", "off"]
_SHAPES = {
    "tuple_type": 'it is a list, as in ["a", "b"]',
    "dict_type": 'it is a table, as in {"key": "value"}',
    "model_type": "it is a section, whose settings are given as section.key=value",
}
"""What pydantic's own words would leave unsaid: how to write it."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
MAX_PIXELS = 89_478_485
"""Upper bound of ``max_pixels``: Pillow takes larger images for decompression bombs."""
PixelLimit = Annotated[int, Field(ge=64, le=MAX_PIXELS)]


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)


class DataSettings(Section):
    """Where images come from and how they are cut into splits and shards."""

    source: str = Field(
        default="digits",
        description="digits | mnist | mnist:DIRECTORY | folder:DIRECTORY | s3://bucket/prefix",
    )
    dataset: str = Field(default="", description="Name of the dataset in the store; empty: taken from the source.")
    size_px: int = Field(
        default=0, ge=0, le=1024, description="Height and width images are brought to; 0: those of the first."
    )
    channels: Literal["auto", "grey", "colour"] = Field(default="auto", description="auto: those of the first image.")
    test_fraction: Fraction = Field(default=0.10, description="Share of images for the frozen test split.")
    gallery_fraction: Fraction = Field(default=0.10, description="Share of images that stand in the index.")
    query_fraction: Fraction = Field(
        default=0.05, description="Share of images the open-set threshold is calibrated on."
    )
    shard_size_bytes: int = Field(default=32 * 2**20, ge=2**16, description="Upper bound of one shard.")
    max_pixels: PixelLimit = Field(
        default=25_000_000, description="Width times height of an image; larger ones are refused."
    )
    decode_threads: int = Field(default=0, ge=0, description="Threads that decode images; 0: one per available CPU.")

    @field_validator("source")
    @classmethod
    def _seen_from_here(cls, source: str) -> str:
        """A relative directory made absolute: a run's steps work in another one than who named it."""
        kind, _, place = source.partition(":")
        return f"{kind}:{Path(place).absolute()}" if kind in ("folder", "mnist") and place else source


class ValidationSettings(Section):
    """Which faults of the data stop a run and which only warn."""

    undecodable: Severity = "error"
    wrong_size: Severity = "warn"
    duplicate: Severity = "warn"
    duplicate_across_splits: Severity = "warn"
    conflicting_labels: Severity = "error"
    tiny_class: Severity = "error"
    empty_split: Severity = "error"
    missing_in_split: Severity = "warn"
    vanished_class: Severity = "error"
    hidden_folder: Severity = "warn"
    constant_image: Severity = "warn"
    imbalance: Severity = "warn"
    min_class_images: int = Field(default=10, ge=1, description="A class with fewer images is tiny.")
    max_imbalance: float = Field(default=10.0, ge=1.0, description="Largest class over smallest class.")


class TrainSettings(Section):
    """The embedding network, its ArcFace head and the training loop."""

    epochs: int = Field(default=12, ge=1)
    min_steps: int = Field(
        default=300, ge=0, description="An epoch of few images repeats them until a run has so many steps."
    )
    batch_size: int = Field(default=256, ge=2)
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = Field(default=0.01, gt=0.0, description="Peak of the schedule.")
    weight_decay: float = Field(default=0.01, ge=0.0)
    momentum: float = Field(default=0.9, ge=0.0, lt=1.0, description="SGD only.")
    schedule: Literal["triangular", "cosine", "constant"] = "triangular"
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=1.0)
    margin: float = Field(default=0.3, ge=0.0, lt=1.6, description="ArcFace m, radians.")
    scale: float = Field(default=32.0, gt=0.0, description="ArcFace s.")
    members: int = Field(
        default=1, ge=1, le=16, description="Networks trained side by side, their embeddings joined: a deep ensemble."
    )
    embedding_dim: int = Field(default=128, ge=2, le=2048, description="Of the whole; a multiple of train.members.")
    width: int = Field(default=16, ge=4, le=512, description="Channels of the first convolution; they double by stage.")
    patch_px: int = Field(default=0, ge=0, le=32, description="Squares of pixels made channels at first; 0: by size.")
    augment: Literal["none", "affine", "elastic"] = "affine"
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    processes: int = Field(default=1, ge=1, description="Training processes, one per GPU, started with torchrun.")
    checkpoint_every_epochs: int = Field(default=1, ge=1)
    patience_epochs: int = Field(
        default=5,
        ge=1,
        description="Stop early after so many epochs that recognise the gallery worse, beyond noise.",
    )
    parity_tolerance: float = Field(default=1e-4, gt=0.0, description="Largest |eager - TorchScript| of an embedding.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.embedding_dim % self.members:
            nearest = math.ceil(self.embedding_dim / self.members) * self.members
            raise ValueError(
                f"embedding_dim is {self.embedding_dim}, no multiple of the {self.members} members; {nearest} is one"
            )
        return self


class IndexSettings(Section):
    """The FAISS index over the gallery and the rule that turns neighbours into a label."""

    factory: str = Field(default="Flat", description="faiss.index_factory string: Flat, HNSW32, IVF256,Flat ...")
    search: str = Field(default="", description="FAISS search parameters of that index: efSearch=64, nprobe=16 ...")
    label_by: Literal["vote", "centroid"] = "vote"
    k: int = Field(default=5, ge=1, le=1000, description="Neighbours that vote.")
    false_accept_rate: float = Field(
        default=0.05, gt=0.0, lt=1.0, description="Unknown images accepted; lower also rejects more known."
    )


class EvaluationSettings(Section):
    """How candidate and champion are measured."""

    confidence: float = Field(default=0.95, gt=0.5, lt=1.0, description="Of every interval.")
    held_out_classes: int = Field(default=2, ge=1, description="Classes an open-set probe never trains on.")
    probe_epochs: int = Field(default=3, ge=1, description="Epochs of the open-set probe.")
    batch_size: int = Field(default=512, ge=1)


class GateSettings(Section):
    """Bounds that a challenger has to keep to replace the champion."""

    accuracy_floor: Fraction = Field(default=0.95, description="Below it nothing is promoted.")
    test_overlap_floor: Fraction = Field(
        default=0.9,
        description="Share of the images that the champion was tested on that the test split must still hold.",
    )
    significance: float = Field(
        default=0.10, gt=0.0, lt=0.5, description="An equally good challenger is held at most this often."
    )
    class_recall_drop: Fraction = Field(
        default=0.05, description="A class may lose this much recall against the champion."
    )
    class_recall_floor: Fraction = Field(default=0.5, description="No class may recall less.")
    index_recall_floor: Fraction = Field(default=0.99, description="Approximate index against exact search.")
    parity_tolerance: float = Field(default=1e-4, gt=0.0, description="As train.parity_tolerance, asked again.")


class ServingSettings(Section):
    """The TorchServe that answers predictions."""

    model_name: str = Field(default="embedding", pattern=r"^[a-z][a-z0-9-]{0,62}$")
    host: str = Field(default="127.0.0.1", description="Address to bind.")
    inference_port: int = Field(default=8080, ge=1, le=65535)
    management_port: int = Field(default=8081, ge=1, le=65535)
    metrics_port: int = Field(default=8082, ge=1, le=65535)
    grpc_inference_port: int = Field(default=7070, ge=1, le=65535)
    grpc_management_port: int = Field(default=7071, ge=1, le=65535)
    workers: int = Field(default=1, ge=1, le=256)
    threads: int = Field(default=1, ge=1, le=256, description="Of each worker; workers times threads fit the cores.")
    batch_size: int = Field(default=32, ge=1, le=1024, description="At most; goes into the release, as do the next 4.")
    max_batch_delay_ms: int = Field(
        default=1, ge=1, le=10_000, description="TorchServe turns 0 into 100 ms, so at least 1."
    )
    queue_size: int = Field(default=512, ge=1, description="Requests that may wait; TorchServe answers more with 503.")
    response_timeout_s: int = Field(default=30, ge=1, description="A worker that takes longer for a batch is replaced.")
    startup_timeout_s: int = Field(default=120, ge=1)
    drain_timeout_s: int = Field(default=30, ge=0, description="What came in before a stop is answered for so long.")
    endpoint_removal_s: int = Field(
        default=10, ge=0, description="A pod answers for so long after its end was decided: until nobody is sent to it."
    )
    model_api: bool = Field(
        default=True,
        description="Releases can be registered on the running server, as a deployment does; "
        "false: it serves what lies in its model store when it starts.",
    )
    max_request_size_bytes: int = Field(default=6_553_500, ge=1024, description="Larger requests get 413.")
    max_pixels: PixelLimit = Field(
        default=25_000_000, description="Width times height of an image; larger ones are refused."
    )
    heap_size_bytes: int = Field(
        default=512 * 2**20,
        ge=128 * 2**20,
        description="Heap of TorchServe's Java. Requests in flight may hold a quarter of it; further ones get 503.",
    )
    keep: int = Field(default=3, ge=1, description="Releases that stay registered for a rollback.")
    smoke_queries: int = Field(
        default=8, ge=1, le=64, description="Stored queries a release must answer before it serves."
    )
    query_log: Literal["off", "figures", "images"] = Field(
        default="figures", description="What is kept of a sample of the live queries, for the watcher to see drift in."
    )
    query_log_sample: int = Field(default=100, ge=1, le=10_000, description="Queries of a worker kept in one period.")
    query_log_period_s: float = Field(default=300.0, gt=0.0, description="After it a worker closes its file.")
    query_log_size_bytes: int = Field(
        default=64 * 2**20, ge=2**20, description="Files that wait on this machine; the oldest go first."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_request_size_bytes > self.heap_size_bytes // 4:
            raise ValueError(
                f"max_request_size_bytes is {self.max_request_size_bytes}; it can be at most a quarter of "
                f"heap_size_bytes, {self.heap_size_bytes // 4}"
            )
        return self


class PrepSettings(Section):
    """The preprocessing server in front of the predictor."""

    host: str = Field(default="127.0.0.1", description="Address to bind.")
    port: int = Field(default=8090, ge=1, le=65535)
    predictor_host: str = Field(
        default="", description="Where TorchServe answers gRPC; empty: the server of the working directory."
    )
    predictor_tls: bool = Field(default=False, description="Speak TLS to ``predictor_host``.")
    timeout_s: float = Field(default=10.0, gt=0.0, description="For one request, all attempts and waiting included.")
    attempts: int = Field(default=4, ge=1, le=5, description="Calls of a predictor that does not answer; gRPC caps 5.")
    in_flight: int = Field(default=64, ge=1, description="Requests at the predictor together; others wait.")
    failures: int = Field(default=5, ge=1, description="Failures in a row that open the circuit breaker.")
    recovery_s: float = Field(default=5.0, gt=0.0, description="Rest of an open breaker before it lets a call pass.")
    max_request_size_bytes: int = Field(default=10 * 2**20, ge=1024, description="Of the JSON; base64 is 4/3.")
    max_bodies_size_bytes: int = Field(
        default=64 * 2**20, ge=1024, description="Bodies of all requests that are being answered; more get 503."
    )
    upload_timeout_s: float = Field(default=10.0, gt=0.0, description="For the arrival of a request's body.")
    large_decodes: int = Field(
        default=1, ge=1, description="Images of more than a megapixel that are decoded together; each adds memory."
    )

    @model_validator(mode="after")
    def _one_body_fits(self) -> Self:
        if self.max_bodies_size_bytes < self.max_request_size_bytes:
            raise ValueError("max_bodies_size_bytes is smaller than max_request_size_bytes, a single body")
        return self


class KubernetesSettings(Section):
    """The serving Deployment that the deploy step rolls out, for target ``kubernetes``."""

    namespace: str = Field(default="evernear", pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    context: str = Field(default="", description="Of the kubeconfig; empty: the pod's own account, else the current.")
    name: str = Field(
        default="evernear-serving",
        pattern=r"^[a-z]([a-z0-9-]{0,45}[a-z0-9])?$",
        description="Of the Deployment, the Service and all that belongs to them.",
    )
    image: str = Field(
        default="",
        pattern=r"^$|^[a-z0-9][A-Za-z0-9._:/-]*@sha256:[0-9a-f]{64}$",
        description="Serving image by digest, REF@sha256:...",
    )
    image_pull_secrets: tuple[str, ...] = ()
    replicas_min: int = Field(default=2, ge=1, description="The HorizontalPodAutoscaler keeps so many, and ...")
    replicas_max: int = Field(default=4, ge=1, description="... at most so many.")
    cpu_target_percent: int = Field(default=70, ge=1, le=100, description="Load at which there have to be more pods.")
    cpu: str = Field(default="2", pattern=r"^[0-9]+(\.[0-9]+|m)?$", description="Of a pod, requested and at most.")
    memory: str = Field(default="2Gi", pattern=r"^[0-9]+[MG]i$", description="Of a pod, requested and at most.")
    gpus: int = Field(default=0, ge=0, description="Of a pod, as nvidia.com/gpu.")
    node_selector: dict[str, str] = {}
    tolerations: tuple[dict[str, str | int], ...] = ()
    s3_secret: str = Field(
        default="evernear-s3-reader", description="Secret with the AWS_ variables of the init container that fetches."
    )
    query_secret: str = Field(
        default="",
        description="Secret with AWS_ variables that may write queries/ of the store; empty: logged queries stay in "
        "their pod, and no drift is seen. Needs Kubernetes 1.29.",
    )
    store_claim: str = Field(
        default="", description="PersistentVolumeClaim with a store file:///path, mounted there; for no object store."
    )
    token_secret: str = Field(
        default="", description="Secret whose key ``token`` inference asks for; empty: the NetworkPolicy alone guards."
    )
    client_namespaces: tuple[str, ...] = Field(
        default=("kubeflow",), description="Whose pods may ask for predictions, besides those of the same namespace."
    )
    metrics_namespaces: tuple[str, ...] = Field(default=("monitoring",), description="Whose pods may read metrics.")
    egress_ports: tuple[int, ...] = Field(
        default=(443, 8333, 9000),
        description="TCP ports that a pod may connect to, for the object store: HTTPS, SeaweedFS, MinIO.",
    )
    service_url: str = Field(
        default="",
        pattern=r"^$|^https?://[^/\s]+$",
        description="Where the Service answers the deploy step; empty: its DNS name, or through the API server.",
    )
    rollout_timeout_s: int = Field(default=600, ge=1, description="A rollout that takes longer is taken back.")
    patience_s: int = Field(
        default=60, ge=1, description="What seldom mends itself (an image, a crash loop) ends a rollout after so long."
    )
    settle_s: int = Field(
        default=60, ge=1, description="After a rollout the Service may take so long to answer with it alone."
    )
    lease_s: int = Field(default=30, ge=1, description="A deployment that died bars the next for so long.")
    take_over: bool = Field(
        default=False, description="Take fields that somebody else set in the cluster, where they differ."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.replicas_max < self.replicas_min:
            raise ValueError(f"replicas_max is less than the {self.replicas_min} of replicas_min")
        return self


class PipelineSettings(Section):
    """The Kubeflow Pipelines server that runs are started on.

    Who asks comes from the environment: KFP_TOKEN (a bearer token) or KFP_COOKIES (``name=value; ...``, a session of
    Dex or IAP); with neither, in a pod, its service account's token for KFP.
    """

    endpoint: str = Field(
        default="",
        pattern=r"^(https?://[^\s]+)?$",
        description="URL of the KFP API; empty: ml-pipeline.kubeflow of the cluster that we are in.",
    )
    namespace: str = Field(default="", description="Of the user, on a multi-user KFP.")
    ui_url: str = Field(default="", description="URL of the KFP UI, for links; empty: the endpoint.")
    ca_file: Path | None = Field(default=None, description="CA certificates (PEM) that the endpoint's is checked by.")
    experiment: str = Field(default="evernear", min_length=1, description="Experiment that runs are kept in.")
    timeout_s: float = Field(default=30.0, gt=0.0, description="For one answer of the API.")
    attempts: int = Field(default=4, ge=1, le=10, description="Of a call that did not reach the API or got 5xx.")


class SlackSettings(Section):
    """The Slack bot. Tokens come from the environment: SLACK_BOT_TOKEN, SLACK_APP_TOKEN, SLACK_SIGNING_SECRET.

    Who may do what: ids of users (U..., W...), user groups (S...) and channels (C..., G...: whoever is in them), as
    Slack shows them under "Copy member ID" and "Copy link". Without any nobody may, so that installing the bot
    hands nothing to a whole workspace; looking is free.
    """

    channel: str = Field(default="", description="Channel (its id) for what nobody asked for: proposals and outcomes.")
    may_start: tuple[str, ...] = Field(default=(), description="Who may start runs, and answer proposals.")
    may_stop: tuple[str, ...] = Field(default=(), description="Who may stop runs.")
    may_promote: tuple[str, ...] = Field(default=(), description="Who may promote what the gate held.")
    may_roll_back: tuple[str, ...] = Field(default=(), description="Who may take a promotion back.")
    may_schedule: tuple[str, ...] = Field(default=(), description="Who may switch the watcher on and off.")
    parameters: tuple[str, ...] = Field(
        default=(
            "preset",
            "train.epochs",
            "train.batch_size",
            "train.learning_rate",
            "train.weight_decay",
            "train.margin",
            "train.scale",
            "train.embedding_dim",
            "train.width",
            "train.augment",
            "train.seed",
            "index.factory",
            "index.search",
            "index.label_by",
            "index.k",
        ),
        description="Settings and pipeline parameters that /retrain may set, each by its full name. Settings of the "
        "gate or of the data among them would let anyone who may start a run decide what is promoted.",
    )
    answer_within_s: int = Field(default=4 * 3600, ge=60, description="A question that waits longer expires.")
    retry_for_s: int = Field(
        default=3600, ge=1, description="A run that KFP does not take for so long after the click is given up."
    )
    poll_s: float = Field(default=5.0, gt=0.0, description="Between two looks at runs and proposals.")
    update_every_s: float = Field(default=15.0, ge=1.0, description="A message is edited at most so often.")
    mode: Literal["socket", "http"] = Field(
        default="socket", description="socket: the bot calls Slack, no public URL; http: Slack calls the bot."
    )
    host: str = Field(default="127.0.0.1", description="Address to bind in mode http.")
    port: int = Field(default=3000, ge=0, le=65535)
    max_request_size_bytes: int = Field(default=2**20, ge=1024, description="Larger requests get 413.")
    api_url: str = Field(default="https://slack.com/api/", description="Slack's Web API; GovSlack has another.")


class WatchSettings(Section):
    """When the watcher proposes to train or to index again."""

    interval_s: int = Field(default=3600, ge=1, description="Between two looks at the source and the live queries.")
    policy: Literal["ask", "start"] = Field(default="ask", description="Ask in Slack, or start the run at once.")
    cooldown_s: int = Field(
        default=6 * 3600, ge=0, description="After an answer or a start, until the same is proposed again."
    )
    bucket_events: bool = Field(
        default=True, description="Look as soon as a bucket at MinIO tells of a change; elsewhere the interval decides."
    )
    settle_s: float = Field(default=60.0, gt=0.0, description="Quiet after a change that a look waits for.")
    new_train_images: int = Field(
        default=100, ge=1, description="New images for training that ask for a training, if also new_train_share."
    )
    new_train_share: float = Field(
        default=0.05, ge=0.0, description="The same as a share of the images that the network was trained on."
    )
    new_gallery_images: int = Field(default=20, ge=1, description="New images for the gallery that ask for an index.")
    drift_window_s: int = Field(default=24 * 3600, ge=1, description="Live queries that a look judges.")
    min_queries: int = Field(default=200, ge=20, description="With fewer sampled in the window nothing is said.")
    false_alarm_rate: float = Field(
        default=0.001, ge=1e-4, lt=0.5, description="Looks that find drift where there is none, at most."
    )
    unknown_rise: Fraction = Field(
        default=0.05, description="Rise of the unknown rate that matters, as a share of all queries."
    )
    distance_shift: Fraction = Field(
        default=0.15, description="Kolmogorov-Smirnov distance of the distances to the gallery that matters."
    )
    embedding_shift: Fraction = Field(default=0.02, description="Energy coefficient of the embeddings that matters.")
    query_retention_s: int = Field(
        default=14 * 24 * 3600, ge=3600, description="Older logged queries are removed from the store."
    )
    health_host: str = Field(default="127.0.0.1", description="Address of the health probe.")
    health_port: int = Field(default=8091, ge=0, le=65535, description="Port of the health probe; 0: none.")


class RunSettings(Section):
    """The settings of a pipeline run and of what serves its release, which Kubeflow Pipelines carries as JSON."""

    workdir: Path = Field(
        default=Path("evernear-work"), description="Runs, logs and, unless ``store`` is set, the store."
    )
    store: str = Field(default="", description="file:///path or s3://bucket/prefix; empty: WORKDIR/store.")
    target: Literal["local", "registry", "kubernetes"] = Field(
        default="local",
        description="Where a promoted release goes: a TorchServe of this machine, the registry alone, "
        "or a Deployment in a cluster.",
    )
    data: DataSettings = DataSettings()
    validation: ValidationSettings = ValidationSettings()
    train: TrainSettings = TrainSettings()
    index: IndexSettings = IndexSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    gate: GateSettings = GateSettings()
    serving: ServingSettings = ServingSettings()
    prep: PrepSettings = PrepSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()

    @property
    def store_uri(self) -> str:
        """The object store's URI, absolute."""
        return self.store or (self.workdir.resolve() / "store").as_uri()


class Settings(RunSettings):
    """All settings: those of a run, and those of what starts runs."""

    pipeline: PipelineSettings = PipelineSettings()
    slack: SlackSettings = SlackSettings()
    watch: WatchSettings = WatchSettings()


PARAMETERS = {"source": "data.source", "serving_image": "kubernetes.image", "target": "target", "store": "store"}
"""The settings that are pipeline parameters in their own right, by the parameter's name."""


def of_run(overrides: Mapping[str, Any], *, preset: str = "", **parameters: str) -> RunSettings:
    """The settings of a pipeline run: the defaults, then ``preset``, then ``overrides``, then ``parameters``.

    ``overrides`` is a tree such as ``{"train": {"epochs": 3}}``; ``parameters`` are those of `PARAMETERS`. An empty
    preset or parameter changes nothing.

    Raises:
        SettingsError: as `load`; or a parameter and ``overrides`` disagree.
    """
    tree: dict[str, Any] = _read_preset(preset) if preset else {}
    merge(tree, overrides)
    for name, value in parameters.items():
        if not value:
            continue
        section, _, key = PARAMETERS[name].rpartition(".")
        given = overrides.get(section, {}) if section else overrides
        if given.get(key, value) != value:
            raise SettingsError(
                f"{PARAMETERS[name]} is set twice, to {value!r} by the parameter {name} and to {given[key]!r} in "
                "settings; remove one of them."
            )
        merge(tree, {section: {key: value}} if section else {key: value})
    return parse(RunSettings, tree)


def load(
    *,
    preset: str | None = None,
    config: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Iterable[str] = (),
) -> Settings:
    """Read the settings of one run; see the module's docstring for the order.

    ``overrides`` are ``section.key=value`` strings; a value is JSON where it parses as JSON, else text.

    Raises:
        SettingsError: unknown key, wrong type, value out of range, or unreadable file.
    """
    tree: dict[str, Any] = {}
    if preset is not None:
        merge(tree, _read_preset(preset))
    if config is not None:
        merge(tree, _read_toml(config))
    for dotted, value in _from_environment(os.environ if environment is None else environment):
        override(tree, dotted, value)
    for word in overrides:
        dotted, equals, text = word.partition("=")
        if not equals:
            raise SettingsError(f"--set {word!r} has no '='; write --set section.key=value.")
        override(tree, dotted.strip(), text)
    return parse(Settings, tree)


def parse(model: type[Model], tree: Mapping[str, Any]) -> Model:
    """``tree`` as a ``model``, or a `SettingsError` of one sentence."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(_sentence(model, error)) from None


def presets() -> list[str]:
    """Names of the presets that come with evernear."""
    return sorted(p.name.removesuffix(".toml") for p in (resources.files("evernear") / "presets").iterdir())


def _read_preset(name: str) -> dict[str, Any]:
    if name not in presets():
        raise SettingsError(f"There is no preset {name!r}; known: {', '.join(presets())}.")
    return tomllib.loads((resources.files("evernear") / "presets" / f"{name}.toml").read_text())


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"The settings file {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"The settings file {path} is not TOML: {error}.") from None


def _from_environment(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    return [
        (name.removeprefix(ENV_PREFIX).lower().replace("__", "."), value)
        for name, value in sorted(environment.items())
        if name.startswith(ENV_PREFIX)
        and not name.startswith(TESTS_PREFIX)
        and name not in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE)
    ]


def override(tree: dict[str, Any], dotted: str, text: str) -> None:
    """Set ``section.key`` of ``tree`` to ``text``, which is JSON where it parses as JSON, else text."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    for key in reversed(dotted.split(".")):
        value = {key: value}
    merge(tree, value)


def merge(into: dict[str, Any], tree: Mapping[str, Any]) -> None:
    """Write ``tree`` over ``into``, key by key; a nested mapping keeps the keys that ``tree`` does not name."""
    for key, value in tree.items():
        held = into.get(key)
        if isinstance(value, Mapping) and isinstance(held, dict):
            merge(held, value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """The names of all settings of ``model``, those of its sections as ``section.key``."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += known_keys(field.annotation, f"{prefix}{name}.")
    return keys


def _sentence(model: type[BaseModel], error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] != "extra_forbidden":
        said = fault["msg"].removeprefix("Value error, ")
        message = _SHAPES.get(fault["type"]) or said[0].lower() + said[1:]
        return f"Setting {key} = {fault['input']!r} cannot be used: {message}."
    known = known_keys(model)
    # A key given without its section (epochs) is nearest to the one that ends with it (train.epochs).
    near = [k for k in known if k.endswith(f".{key}")] or difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f"There is no setting {key!r}; did you mean {near[0]!r}?"
