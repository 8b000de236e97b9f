"""The embedding network: a small convolutional network for gray or color images of any size."""

import hashlib
import io
import math
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evernear.common.frozen import Frozen
from evernear.common.step_results import code_digest
from evernear.data.preprocess import NetworkInput
from evernear.embedding import CODE
from evernear.errors import IntegrityError


class Architecture(Frozen):
    """Everything needed to build a network, except the weights."""

    shape: tuple[int, int, int]
    """Height, width and number of channels of an image."""
    mean: tuple[float, ...]
    """Mean of each channel over the training images, with pixels scaled to 0..1."""
    std: tuple[float, ...]
    patch_px: int
    """Side length in pixels of the patches whose pixels become channels before the first
    convolution."""
    width: int
    """Number of output channels of the first convolution."""
    embedding_dim: int
    """Dimensions of the whole embedding, of which each ensemble member computes an equal share."""
    members: int = 1
    backbone: str = "compact"
    """A name in `MEMBERS`, or a timm model. ``input`` and ``frozen`` apply only to timm models."""
    input: NetworkInput | None = None
    frozen: bool = False
    """Whether only an affine map of the backbone's features was fitted or trained."""
    pretrained: bool = False
    """Whether training started from a pretrained backbone and an affine map of its features."""
    test_time_flip: bool = False
    """Whether to average the embeddings of an image and its mirror image."""


INFERENCE_BYTES = 64 * 2**20
"""Maximum size of the activations that exist at once during inference, per embedding thread.

A layer's input and output are at most half of it. glibc returns larger tensors to the system after
each layer (``M_MMAP_THRESHOLD``, mallopt(3)), and the page faults of the next layer can take longer
than its computation.
"""
TRAINING_BYTES = 2**30
"""Maximum size of the activations that a training step on a CPU stores for the backward pass."""
GPU_MEMORY_FRACTION = 0.5
"""The same on a GPU, as a fraction of its memory."""
INFERENCE_FACTOR = 2.0
"""Intermediate results and memory-format copies, relative to a layer's input and output."""
TRAINING_FACTOR = 2.0
"""Gradients of activations and what layers store besides their output, relative to its size."""


def inference_batch_size(network: nn.Module, image: Tensor) -> int:
    """The largest batch to process without gradients. ``image`` (1, C, H, W) is an example."""
    largest = max(_layer_bytes(network, image, lambda inputs, output: inputs + output), default=1)
    return max(1, int(INFERENCE_BYTES / (largest * INFERENCE_FACTOR)))


def training_batch_size(network: nn.Module, image: Tensor, device: torch.device) -> int:
    """The largest batch to process with gradients. ``image`` (1, C, H, W) is an example."""
    limit = TRAINING_BYTES
    if device.type == "cuda":
        limit = int(torch.cuda.get_device_properties(device).total_memory * GPU_MEMORY_FRACTION)
    total = sum(_layer_bytes(network, image, lambda _, output: output))
    return max(2, int(limit / max(1, total * TRAINING_FACTOR)))


@torch.no_grad()
def _layer_bytes(network: nn.Module, image: Tensor, measure: Callable[[int, int], int]) -> list[int]:
    """``measure(input bytes, output bytes)`` of each layer when ``network`` processes one image."""
    measured: list[int] = []

    def hook(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        measured.append(measure(sum(map(_bytes, inputs)), _bytes(output)))

    layers = [module for module in network.modules() if not any(module.children())]
    handles = [layer.register_forward_hook(hook) for layer in layers]
    was_training = network.training
    try:
        network.eval()(image)
    finally:
        network.train(was_training)
        for handle in handles:
            handle.remove()
    return measured


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


MAX_LAST_GRID = 3
"""Maximum side of the last feature map, which preserves the positions of features. Stages are added
until it fits."""
MAX_FIRST_GRID = 96
"""Maximum side of the patch grid. Larger images are split into patches to limit the cost."""
MAX_WIDTH_FACTOR = 8
"""Maximum number of channels, relative to the first stage's. It doubles from stage to stage."""


class EmbeddingNetwork(nn.Module):
    """Maps uint8 images (N, C, H, W) to float32 unit vectors (N, ``embedding_dim``).

    The first layer normalizes by mean and standard deviation, so pixels are integers or floats in
    0..255.

    Several members make a deep ensemble (Lakshminarayanan et al. 2017, arXiv:1612.01474), whose
    members differ only in their initial weights. Their embeddings are concatenated, so the
    similarity of two images is the mean of the members' similarities.

    With ``Architecture.test_time_flip``, the trained network embeds each image together with its
    mirror image, as in the evaluation of ArcFace (Deng et al. 2019, arXiv:1801.07698), which
    doubles the embedding time.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.register_buffer("mean", _per_channel(architecture.mean))
        self.register_buffer("std", _per_channel(architecture.std))
        self.mean: Tensor
        self.std: Tensor
        self.members = nn.ModuleList(_build_member(architecture) for _ in range(architecture.members))
        self.length = math.sqrt(architecture.members)
        self.test_time_flip = architecture.test_time_flip
        self.max_batch_size = 2**31 - 1
        """Larger batches are split outside training to limit memory use."""

    def forward(self, images: Tensor) -> Tensor:
        """Embed ``images`` (N, C, H, W), uint8 or float in 0..255, as unit vectors (N, D)."""
        if self.training:
            return self.embed(images)
        return torch.cat([self.embed_trained(part) for part in images.split(self.max_batch_size)])

    def embed_trained(self, images: Tensor) -> Tensor:
        """Like `forward` in eval mode, but without splitting the batch."""
        if not self.test_time_flip:
            return self.embed(images)
        return F.normalize(self.embed(images) + self.embed(images.flip(-1)))

    def embed(self, images: Tensor) -> Tensor:
        """Embed ``images`` without their mirror images."""
        pixels = (images.to(torch.float32) / 255 - self.mean) / self.std
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        return torch.cat([member(pixels) for member in self.members], dim=1) / self.length


class _Member(nn.Module):
    """A convolutional network that maps normalized pixels to unit vectors.

    A stage is two 3x3 convolutions and a 2x2 max-pooling, as in VGG (Simonyan and Zisserman 2014,
    arXiv:1409.1556), with batch normalization. The first, which has the most pixels, has one
    convolution. There are at least two stages, and more if necessary to reach `MAX_LAST_GRID`.
    Pooling comes before normalization and activation, which then process only a quarter of the
    values.

    For color images, convolutions are initialized to the identity as far as their channels allow,
    and the activation is GELU (both as in airbench94, Jordan 2024, arXiv:2404.00498). This raises
    the accuracy on CIFAR-10 after five epochs of 20,000 images from 74.1% to 77.4%, but not on
    digits.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        height, width, channels = architecture.shape
        patch = architecture.patch_px
        convolution = partial(_convolution, color=channels == 3)
        layers: list[nn.Module] = [_PadToMultiple(patch), nn.PixelUnshuffle(patch)] if patch > 1 else []
        features, grid = channels * patch**2, (math.ceil(height / patch), math.ceil(width / patch))
        stage = 0
        while stage < 2 or max(grid) > MAX_LAST_GRID:
            outputs = architecture.width * min(2**stage, MAX_WIDTH_FACTOR)
            stride = (2 if grid[0] > MAX_LAST_GRID else 1, 2 if grid[1] > MAX_LAST_GRID else 1)
            if stage > 0:
                layers.append(convolution(features, outputs))
                features = outputs
            layers.append(convolution(features, outputs, stride))
            features, grid = outputs, (grid[0] // stride[0], grid[1] // stride[1])
            stage += 1
        dim = architecture.embedding_dim // architecture.members
        self.features = nn.Sequential(*layers)
        self.project = nn.Linear(features * grid[0] * grid[1], dim, bias=False)
        self.standardize = nn.BatchNorm1d(dim)

    def forward(self, pixels: Tensor) -> Tensor:
        features = self.features(pixels).flatten(1)
        return F.normalize(self.standardize(self.project(features).to(torch.float32)))


MEMBERS: dict[str, type[nn.Module]] = {"compact": _Member}
"""By backbone name. All other names are timm models."""


def _build_member(architecture: Architecture) -> nn.Module:
    if architecture.backbone in MEMBERS:
        return MEMBERS[architecture.backbone](architecture)
    from evernear.embedding.timm_member import TimmMember  # timm is not installed where releases are served

    return TimmMember(architecture)


def build_network(architecture: Architecture) -> EmbeddingNetwork:
    """With random weights, in channels-last memory format."""
    network = EmbeddingNetwork(architecture)
    height, width, channels = architecture.shape
    network.max_batch_size = inference_batch_size(network, torch.zeros((1, channels, height, width), dtype=torch.uint8))
    return network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def _per_channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(1, -1, 1, 1)


def choose_patch(height: int, width: int) -> int:
    """Side of the patches, in pixels, for images of ``height`` x ``width`` pixels."""
    patch = 1
    while min(height, width) / patch >= MAX_FIRST_GRID:
        patch *= 2
    return patch


def _convolution(inputs: int, outputs: int, stride: tuple[int, int] = (1, 1), *, color: bool) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
    if color and inputs <= outputs:  # fewer outputs would ignore some inputs
        nn.init.dirac_(convolution.weight.data[:inputs])
    pooling = [nn.MaxPool2d(stride)] if stride != (1, 1) else []
    activation = nn.GELU() if color else nn.ReLU(inplace=True)
    return nn.Sequential(convolution, *pooling, nn.BatchNorm2d(outputs), activation)


class _PadToMultiple(nn.Module):
    """Pads right and bottom with zeros, the mean color, to a multiple of ``multiple`` pixels."""

    def __init__(self, multiple: int) -> None:
        super().__init__()
        self.multiple = multiple

    def forward(self, pixels: Tensor) -> Tensor:
        right, bottom = -pixels.shape[3] % self.multiple, -pixels.shape[2] % self.multiple
        return F.pad(pixels, (0, right, 0, bottom))


Network = Callable[[Tensor], Tensor]
"""Maps uint8 images (N, C, H, W) to vectors (N, D)."""
LIBRARIES = ("timm", "torch")
"""Libraries whose versions affect a network's outputs."""


def network_identity(network: nn.Module, architecture: str) -> str:
    """The sha256 of ``architecture``, the parameters and buffers of ``network``, and the code."""
    sha256 = hashlib.sha256(architecture.encode())
    sha256.update(code_digest(CODE, LIBRARIES).encode())
    for name, tensor in sorted(network.state_dict().items()):
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha256.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def to_torchscript(network: nn.Module) -> bytes:
    buffer = io.BytesIO()
    with ignore_torchscript_deprecation():
        torch.jit.save(torch.jit.script(network.eval()), buffer)
    return buffer.getvalue()


def load_torchscript(file: Path) -> torch.jit.ScriptModule:
    """Load a file on the CPU, with constant parameters. The caller must have verified the file."""
    return freeze_parameters(read_torchscript(file))


def read_torchscript(file: Path) -> torch.jit.ScriptModule:
    """Like `load_torchscript`, but keeps the submodules."""
    with ignore_torchscript_deprecation():
        try:
            return torch.jit.load(file, map_location="cpu").eval()
        except (RuntimeError, ValueError) as error:
            raise IntegrityError(f"{file} is not a TorchScript network; run the export step again.") from error


def freeze_parameters(network: nn.Module) -> torch.jit.ScriptModule:
    """Script the network in eval mode, and turn its parameters into constants."""
    with ignore_torchscript_deprecation():
        scripted = network if isinstance(network, torch.jit.ScriptModule) else torch.jit.script(network.eval())
        return torch.jit.freeze(scripted.eval())


@contextmanager
def ignore_torchscript_deprecation() -> Generator[None]:
    """``torch.jit`` is deprecated (torch 2.13), but TorchServe loads only TorchScript."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        yield
