"""Settings of the steps that make a release: data, training, index, evaluation and gate."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from evernear import plugins
from evernear.class_names import class_name
from evernear.settings.section import Fraction, PixelLimit, Section, absolute

Severity = Literal["error", "warn", "info", "off"]
ClassName = Annotated[str, AfterValidator(class_name)]


BUILT_IN_SOURCES = ("digits", "mnist")
"""Sources that are names, not locations."""


class DataSettings(Section):
    """Where images come from, and how they are divided into splits and shards."""

    source: str = Field(
        default="digits",
        description="digits | mnist | mnist:DIRECTORY | folder:DIRECTORY | s3://bucket/prefix",
    )
    dataset: str = Field(default="", description="Name of the dataset in the store; if empty, derived from the source.")
    moved_from: str = Field(
        default="",
        description="The earlier location of the source, as data.source named it, if its images have moved. Images "
        "that are gone since are removed, and new labels count.",
    )
    size_px: int = Field(
        default=0, ge=0, le=1024, description="Height and width of resized images; 0: from the images' median size."
    )
    max_size_px: int = Field(
        default=0, ge=0, le=1024, description="Largest automatic size; 0: 128, or 224 with train.weights."
    )
    resize: Literal["auto", "crop", "letterbox", "stretch"] = Field(
        default="auto",
        description="Images of another aspect ratio: crop to the center, pad with gray bars, or stretch; auto: crop, "
        "or letterbox if more than half would be lost.",
    )
    bit_depth: int = Field(
        default=0,
        description="Bits that the values of 16-bit images use: 8, 10, 12, 14 or 16; larger values are clipped. "
        "0: from a sample of the first ingest.",
    )
    channels: Literal["auto", "gray", "color"] = Field(default="auto", description="auto: those of most images.")
    layout: Literal["auto", "classes", "innermost"] = Field(
        default="auto",
        description="Folders of a source; auto: splits by their names, and classes in them or above them; classes: "
        "the top-level folders are the classes, whatever their names; innermost: as auto, but each innermost folder "
        "is a class.",
    )
    split_folders: dict[str, Literal["train", "test", "gallery", "query", "none"]] = Field(
        default={}, description="The split of folders whose names do not say it; none: leave the folder out."
    )
    test_fraction: Fraction = Field(default=0.10, description="Share of images in the frozen test split.")
    gallery_fraction: Fraction = Field(default=0.10, description="Share of images in the index.")
    query_fraction: Fraction = Field(default=0.05, description="Share of images that calibrate the open-set threshold.")
    shard_size_bytes: int = Field(default=32 * 2**20, ge=2**16, description="Largest size of a shard.")
    max_pixels: PixelLimit = Field(
        default=25_000_000, description="Largest width times height of an image; larger images are rejected."
    )
    reread: bool = Field(
        default=False,
        description="Read all files again and compare their contents, as --checksum of rsync does, instead of trusting "
        "sizes, times and ETags; for one run: --reread.",
    )
    requests_in_flight: int = Field(
        default=32, ge=1, le=64, description="Files to read concurrently, from a bucket or a folder."
    )
    decode_threads: int = Field(default=0, ge=0, description="Threads that decode images; 0: one per available CPU.")

    @field_validator("bit_depth")
    @classmethod
    def _known_bit_depth(cls, bit_depth: int) -> int:
        if bit_depth not in (0, 8, 10, 12, 14, 16):
            raise ValueError("it is 8, 10, 12, 14 or 16, or 0 for the bits that the images use")
        return bit_depth

    @field_validator("source", "moved_from")
    @classmethod
    def _absolute(cls, source: str) -> str:
        """Make a directory absolute, also one below ``~``: the steps of a run have another working directory."""
        if source and source not in BUILT_IN_SOURCES and Path(source).is_dir():
            raise ValueError(f"{source!r} is a directory; use folder:{source} for the images in it")
        kind, _, directory = source.partition(":")
        return f"{kind}:{absolute(directory)}" if kind in ("folder", "mnist") and directory else source

    @model_validator(mode="after")
    def _has_splits(self) -> Self:
        splits = [folder for folder, split in self.split_folders.items() if split != "none"]
        if self.layout == "classes" and splits:
            raise ValueError(f"layout=classes says that no folder is a split, but split_folders names {splits[0]!r}")
        return self


class ClassSettings(Section):
    """Classes of the champion that were removed or renamed on purpose. Entries for other classes are ignored."""

    retired: tuple[ClassName, ...] = Field(
        default=(), description="Classes that new releases no longer need to recognize."
    )
    renamed: dict[ClassName, ClassName] = Field(default={}, description="New name of each renamed class.")

    @field_validator("renamed")
    @classmethod
    def _without_spellings(cls, renamed: dict[str, str]) -> dict[str, str]:
        """Two spellings of one name are one class (`evernear.class_names`)."""
        return {old: new for old, new in renamed.items() if old != new}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if both := sorted({*self.retired} & {*self.renamed, *self.renamed.values()}):
            raise ValueError(f"{both[0]!r} is both retired and renamed")
        if chained := sorted({*self.renamed} & {*self.renamed.values()}):
            raise ValueError(f"{chained[0]!r} is both the old and the new name of a class")
        return self

    def current(self, label: str) -> str | None:
        """The current name of a class of the champion, which may be an earlier spelling; None if it was retired."""
        name = class_name(label)
        return None if name in self.retired else self.renamed.get(name, name)

    def current_labels(self, labels: Iterable[str]) -> tuple[str, ...]:
        """The current names of ``labels``, without retired classes and duplicates."""
        return tuple(dict.fromkeys(name for name in map(self.current, labels) if name is not None))

    @property
    def former_names(self) -> tuple[str, ...]:
        """Names that images may no longer have."""
        return (*self.retired, *self.renamed)


class ValidationSettings(Section):
    """Severity of each validation rule: an error stops the run, a warning does not, and info is no problem."""

    undecodable: Severity = Field(
        default="error",
        description="A file is not an image, is damaged, or exceeds a limit; it is left out. Only a"
        " warning up to max_left_out_fraction.",
    )
    cropped: Severity = Field(
        default="warn", description="Images of another aspect ratio were cropped to their centers."
    )
    letterboxed: Severity = Field(
        default="warn", description="Images of another aspect ratio were padded with gray bars."
    )
    stretched: Severity = Field(default="warn", description="Images of another aspect ratio were stretched.")
    upscaled: Severity = Field(
        default="warn", description="Images are smaller than the dataset's size and were enlarged."
    )
    duplicate: Severity = Field(default="warn", description="An image occurs more than once; it is used once.")
    duplicate_across_splits: Severity = Field(
        default="warn", description="An image is in several splits; it is added to one of them."
    )
    conflicting_labels: Severity = Field(
        default="error",
        description="An image has several labels; it is left out. Only a warning up to max_left_out_fraction.",
    )
    tiny_class: Severity = Field(default="error", description="A class has fewer than min_class_images images.")
    empty_split: Severity = Field(default="error", description="A split has no image.")
    missing_in_gallery: Severity = Field(
        default="error",
        description="A class has no image in train or the gallery, so the class cannot be recognized.",
    )
    missing_in_split: Severity = Field(default="warn", description="Another split has no image of a class.")
    vanished_class: Severity = Field(
        default="error", description="A class of the champion has no image, unless ``classes`` retires or renames it."
    )
    unknown_class: Severity = Field(
        default="warn", description="``classes`` retires or renames a class that the champion does not have."
    )
    hidden_folder: Severity = Field(
        default="warn", description="The name of a class folder begins with a dot; it is left out."
    )
    no_class: Severity = Field(default="warn", description="An image is in no class folder; it is left out.")
    not_an_image: Severity = Field(
        default="info",
        description="A file has neither the suffix nor the content of an image; it is left out.",
    )
    litter: Severity = Field(
        default="info",
        description="A file or folder is hidden, or left behind by a system or program, such as @eaDir; it is left"
        " out.",
    )
    merged_folders: Severity = Field(
        default="info", description="Folders are one class, because their names look the same."
    )
    similar_classes: Severity = Field(
        default="warn", description="Names of classes differ only in case, width or characters that nobody sees."
    )
    nested_folder: Severity = Field(
        default="warn", description="A class folder contains folders, which may be classes; see data.layout."
    )
    outside_link: Severity = Field(
        default="info", description="A link leads to a folder outside of the source; its images are used."
    )
    constant_image: Severity = Field(default="warn", description="All pixels of an image have the same value.")
    low_contrast: Severity = Field(
        default="warn", description="8 bits keep fewer than 16 gray values of a 16-bit or transparent image."
    )
    clipped: Severity = Field(default="warn", description="A 16-bit image has values beyond the dataset's bit depth.")
    imbalance: Severity = Field(
        default="warn", description="The largest class has more than max_imbalance times the images of the smallest."
    )
    max_left_out_fraction: float = Field(
        default=0.02,
        ge=0,
        le=1,
        description="Largest share of images that may be undecodable or have conflicting labels without an error.",
    )
    min_class_images: int = Field(default=10, ge=1, description="A class with fewer images is tiny.")
    max_imbalance: float = Field(
        default=10.0, ge=1.0, description="Largest ratio of the largest class to the smallest class."
    )


class TrainSettings(Section):
    """The embedding network, its ArcFace head and the training loop."""

    epochs: int = Field(
        default=0,
        ge=0,
        description="Passes over the training images; 0: 12 if gray, 10 if color with Muon, 24 if color otherwise.",
    )
    min_steps: int = Field(
        default=-1,
        ge=-1,
        description="Smallest number of training steps; small datasets are repeated within an epoch. "
        "-1: 300 if gray, 400 if color with Muon, 600 if color otherwise.",
    )
    batch_size: int = Field(default=256, ge=2, description="Images per step, over all processes.")
    optimizer: Literal["auto", "muon", "adamw", "sgd"] = Field(
        default="auto",
        description="Muon, AdamW, or SGD with Nesterov momentum; auto: muon for color images in the compact backbone "
        "without pretrained weights, otherwise adamw.",
    )
    learning_rate: float = Field(default=0.01, gt=0.0, description="Peak of the schedule.")
    weight_decay: float = Field(
        default=-1.0,
        ge=-1.0,
        description="Decoupled for Muon and AdamW, an L2 penalty for SGD; -1: 0.01, but 1.8 / (learning rate x steps) "
        "for color images with Muon or AdamW.",
    )
    momentum: float = Field(default=0.9, ge=0.0, lt=1.0, description="Momentum of Muon and SGD.")
    schedule: Literal["triangular", "cosine", "constant"] = Field(
        default="triangular", description="Learning rate schedule."
    )
    label_smoothing: float = Field(
        default=-1.0,
        ge=-1.0,
        lt=1.0,
        description="Share of the target that is spread over all classes; -1: 0.1 if the images are color and "
        "train.scale is 0, otherwise 0.",
    )
    margin: float = Field(
        default=0.3, ge=0.0, lt=1.6, description="ArcFace margin m, in radians, reached halfway through training."
    )
    scale: float = Field(
        default=0.0,
        ge=0.0,
        description="ArcFace scale s; 0: from the number of classes (16.5 for 10, 20.5 for 100; with label smoothing, "
        "8.2 and 11.4).",
    )
    members: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Networks in a deep ensemble. They train together, and their embeddings are concatenated.",
    )
    embedding_dim: int = Field(
        default=128, ge=2, le=2048, description="Dimensions of the embedding; a multiple of train.members."
    )
    backbone: str = Field(
        default="auto",
        min_length=1,
        description="compact: a small convolutional network; any timm model: resnet18, mobilenetv3_small_100 ...; "
        "auto: compact, or resnet18 if train.weights is set.",
    )
    weights: str = Field(
        default="",
        description="Initial weights of the backbone: a file (safetensors or torch), file:///path, "
        "s3://bucket/key, or hub to download timm's; if empty, random weights.",
    )
    backbone_size_px: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Side of the input images of a timm backbone; 0: as in its pretraining with train.weights, "
        "otherwise as in the dataset.",
    )
    backbone_learning_rate_factor: float = Field(
        default=0.0,
        ge=0.0,
        description="Learning rate of the backbone, relative to that of the other layers; 0: 0.1 with train.weights, "
        "otherwise 1.",
    )
    frozen: bool = Field(default=False, description="Use the features of a pretrained backbone, without training.")
    width: int = Field(
        default=0,
        ge=0,
        le=512,
        description="Channels of the first convolution; each stage doubles them. "
        "0: 16 if gray, 48 if color with Muon, 32 if color otherwise.",
    )
    patch_px: int = Field(
        default=0, ge=0, le=32, description="Side of the patches whose pixels become channels; 0: from the image size."
    )
    augment: Literal["auto", "none", "shift", "affine", "elastic"] = Field(
        default="auto",
        description="Random augmentation of training images; auto: affine if they are gray, shift if they are color.",
    )
    flip: Literal["auto", "none", "horizontal", "vertical", "both"] = Field(
        default="auto",
        description="Random flips of the training images; auto: measured during training, so that photographs are "
        "flipped and digits are not.",
    )
    test_time_flip: bool = Field(
        default=True,
        description="Average the embeddings of an image and its mirror image if training uses horizontal flips; "
        "doubles the time of an embedding.",
    )
    seed: int = Field(default=0, description="Seed of the initial weights, the order of images and augmentation.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: a GPU if PyTorch detects one.")
    precision: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Data type of activations; auto: half precision if the device supports it."
    )
    processes: int = Field(default=1, ge=1, description="Training processes per node, one per GPU.")
    nodes: int = Field(
        default=1, ge=1, description="Nodes that train together, as a TrainJob of Kubeflow Trainer if more than 1."
    )
    checkpoint_every_epochs: int = Field(
        default=1, ge=1, description="Epochs between checkpoints, from which interrupted training resumes."
    )
    patience_epochs: int = Field(
        default=5,
        ge=1,
        description="Epochs without improvement in gallery accuracy, beyond noise, before training stops early.",
    )
    parity_tolerance: float = Field(
        default=1e-4,
        gt=0.0,
        description="Largest difference between the eager and the TorchScript embedding of an image.",
    )

    @field_validator("weight_decay", "label_smoothing")
    @classmethod
    def _not_between(cls, value: float) -> float:
        if -1 < value < 0:
            raise ValueError(f"{value:g} is negative; use 0 or more, or -1 to choose by the images")
        return value

    @field_validator("weights")
    @classmethod
    def _absolute(cls, weights: str) -> str:
        """Make a relative path absolute: the steps of a run have another working directory."""
        return weights if weights in ("", "hub") or "://" in weights else str(absolute(weights))

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.embedding_dim % self.members:
            nearest = math.ceil(self.embedding_dim / self.members) * self.members
            raise ValueError(
                f"embedding_dim is {self.embedding_dim}, not a multiple of the {self.members} members; try {nearest}"
            )
        return self

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.nodes > 1 and self.weights not in ("", "hub") and not self.weights.startswith("s3://"):
            raise ValueError(f"weights is {self.weights}, which other nodes cannot read; use s3://bucket/key or hub")
        return self


class TrainJobSettings(Section):
    """The TrainJob of Kubeflow Trainer, for ``train.nodes`` above 1."""

    runtime: str = Field(
        default="evernear",
        pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$",
        description="TrainingRuntime that defines the resources, volumes and Secrets of the nodes.",
    )
    namespace: str = Field(
        default="",
        pattern=r"^$|^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        description="Namespace of the TrainJob; if empty, that of the pod that runs the train step.",
    )
    image: str = Field(default="", description="Image of the nodes; if empty, that of the pipeline.")
    timeout_s: int = Field(default=24 * 3600, ge=60, description="`activeDeadlineSeconds` of the TrainJob.")


class IndexSettings(Section):
    """The index of the gallery, and the rule that turns neighbors into a label."""

    backend: str = Field(
        default=plugins.FAISS,
        description="faiss: vectors in the archive; milvus: in a collection, for more than one machine.",
    )
    uri: str = Field(
        default="",
        pattern=r"^(https?://[^@\s]+|/.+\.db|[^:]+\.db)?$",
        description="Milvus: http://HOST:19530, https://..., or a path that ends with .db for Milvus Lite. The token "
        "is in EVERNEAR_MILVUS_TOKEN or EVERNEAR_MILVUS_TOKEN_FILE.",
    )
    collection: str = Field(
        default="evernear",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$",
        description="Milvus: alias of the champion's collection, and prefix of all names; use one per store.",
    )
    type: str = Field(
        default="auto",
        description="auto: chosen by size, recall and memory (Flat up to 8 MiB of vectors); or a faiss.index_factory "
        "string: Flat, HNSW32, IVF256,Flat ...; or an index type of Milvus: FLAT, HNSW,M=32,efConstruction=360 ...",
    )
    search: str = Field(
        default="", description="Search parameters of that type: efSearch=64, nprobe=16 ...; of Milvus: ef=64 ..."
    )
    recall: Fraction = Field(
        default=0.99, description="Recall@1 against exact search that auto must reach, with 95% confidence."
    )
    memory_mb: int = Field(
        default=2000, ge=1, description="Size of the largest approximate index that auto may choose; FAISS only."
    )
    label_by: Literal["auto", "vote", "centroid"] = Field(
        default="auto",
        description="vote: the majority of the k nearest neighbors; centroid: the nearest class centroid; "
        "auto: vote, unless the centroids label clearly more images of the query split correctly.",
    )
    k: int = Field(default=5, ge=1, le=1000, description="Number of neighbors in the vote.")
    false_accept_rate: float = Field(
        default=0.05,
        gt=0.0,
        lt=1.0,
        description="Share of images of unseen classes to accept. A lower value also rejects more known images.",
    )
    false_reject_rate: float = Field(
        default=0.05,
        gt=0.0,
        lt=1.0,
        description="Largest share of known images to call unknown; takes precedence over false_accept_rate.",
    )

    @field_validator("backend")
    @classmethod
    def _known(cls, backend: str) -> str:
        if backend not in plugins.backend_names():
            raise ValueError(f"should be one of {', '.join(plugins.backend_names())}")
        return backend

    @field_validator("uri")
    @classmethod
    def _absolute(cls, uri: str) -> str:
        """Make a relative path absolute: the steps of a run have another working directory."""
        return uri if not uri or "://" in uri else str(absolute(uri))

    @property
    def temporary(self) -> "IndexSettings":
        """Settings of an index that only one process uses: a FAISS index."""
        if self.backend == plugins.FAISS:
            return self
        return self.model_copy(update={"backend": plugins.FAISS, "type": "auto", "search": ""})


class EvaluationSettings(Section):
    """How candidate and champion are measured."""

    confidence: float = Field(default=0.95, gt=0.5, lt=1.0, description="Confidence level of every interval.")
    held_out_classes: int = Field(default=2, ge=1, description="Classes left out of the open-set probe's training.")
    probe_epochs: int = Field(
        default=0,
        ge=0,
        description="Epochs of the open-set probe; 0: a quarter of those of training, 60% with Muon.",
    )
    batch_size: int = Field(default=512, ge=1, description="Images per forward pass.")


class GateSettings(Section):
    """Conditions that a candidate must meet to replace the champion."""

    accuracy_floor: Fraction = Field(default=0.0, description="Smallest accuracy to promote; 0: any.")
    beat_baseline: bool = Field(
        default=True,
        description="Whether a first release must be significantly more accurate than trivial baselines.",
    )
    test_overlap_floor: Fraction = Field(
        default=0.9,
        description="Smallest share of the champion's test images that the test split must still contain.",
    )
    significance: float = Field(
        default=0.10, gt=0.0, lt=0.5, description="Largest probability of holding an equally good candidate."
    )
    class_recall_drop: Fraction = Field(
        default=0.05, description="Largest loss of recall in any class, compared with the champion."
    )
    class_recall_floor: Fraction = Field(default=0.5, description="Smallest recall of any class.")
    false_reject_ceiling: Fraction = Field(
        default=0.10, description="Largest share of known test images that may be called unknown."
    )
    index_recall_floor: Fraction = Field(
        default=0.99, description="Smallest recall of the approximate index, compared with exact search."
    )
    parity_tolerance: float = Field(
        default=1e-4, gt=0.0, description="As train.parity_tolerance, checked again by the gate."
    )


class CostSettings(Section):
    """Prices for the [cost of a run](run-page.md#cost), by default of AWS Fargate, on demand, us-east-1, Linux/x86."""

    currency: str = Field(default="USD", max_length=8, description="Currency of the prices.")
    cpu_hour: float = Field(default=0.04048, ge=0.0, description="Price of a CPU for an hour.")
    memory_gib_hour: float = Field(default=0.004445, ge=0.0, description="Price of 1 GiB of memory for an hour.")
    gpu_hour: float = Field(
        default=0.0, ge=0.0, description="Price of a GPU for an hour; 0: unknown, and so is the cost of steps with one."
    )
