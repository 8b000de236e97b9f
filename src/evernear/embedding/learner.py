"""What is trained: the network with its ArcFace head, and how its weights are moved."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evernear.embedding.arcface import ArcFace
from evernear.embedding.images import TrainingImages
from evernear.embedding.network import Architecture, build
from evernear.errors import TrainingError
from evernear.settings import TrainSettings

WARM_UP = 0.2
"""Share of all steps in which the learning rate rises to its peak."""


class Learner(nn.Module):
    """The embedding network with an ArcFace head for each of its members, as one module; the network alone
    runs in mixed precision."""

    def __init__(
        self, architecture: Architecture, classes: int, settings: TrainSettings, precision: torch.dtype
    ) -> None:
        super().__init__()
        self.network = build(architecture)
        dim = architecture.embedding_dim // architecture.members
        self.heads = nn.ModuleList(
            ArcFace(classes, dim, settings.scale, settings.margin) for _ in range(architecture.members)
        )
        self.precision = precision

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Each member's logits (N, classes, members) of ``images`` (N, C, H, W); with the margin where
        ``classes`` (N,) are given."""
        with torch.autocast(images.device.type, self.precision, enabled=self.precision != torch.float32):
            embeddings = self.network(images)
        parts = embeddings.chunk(len(self.heads), dim=1)
        return torch.stack([head(part, classes) for head, part in zip(self.heads, parts, strict=True)], dim=2)


def cross_entropy(logits: Tensor, classes: Tensor, label_smoothing: float) -> Tensor:
    """Mean over images and members: ``logits`` (N, classes, members) as `Learner` gives them, ``classes`` (N,)."""
    targets = classes[:, None].expand(-1, logits.shape[2])
    return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)


def choose_device(settings: TrainSettings, rank: int) -> torch.device:
    """The device of process ``rank``: its GPU where there is one, unless the settings say otherwise.

    Raises:
        TrainingError: a GPU was asked for and there are not enough.
    """
    gpus = torch.cuda.device_count() if settings.device != "cpu" else 0
    if settings.device == "cuda" and rank >= gpus:
        raise TrainingError(
            f"train.device is cuda, but process {rank + 1} of {settings.processes} finds only {gpus} GPUs; "
            "lower train.processes or take train.device=auto."
        )
    return torch.device("cuda", rank) if rank < gpus else torch.device("cpu")


def choose_precision(settings: TrainSettings, device: torch.device) -> torch.dtype:
    """The type of the network's activations; ``auto`` takes half precision where the device computes in
    it."""
    if settings.precision != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[settings.precision]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    cpu = torch.cpu.get_capabilities()
    return torch.bfloat16 if cpu.get("avx512_bf16") or cpu.get("amx_bf16") else torch.float32


def choose_optimizer(learner: Learner, settings: TrainSettings) -> torch.optim.Optimizer:
    """AdamW or SGD with Nesterov momentum; scales and shifts of the normalisations do not decay."""
    matrices = [p for p in learner.parameters() if p.ndim > 1]
    vectors = [p for p in learner.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=settings.learning_rate, fused=True)
    nesterov = settings.momentum > 0
    return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum, nesterov=nesterov, fused=True)


def learning_rate(settings: TrainSettings, done: float) -> float:
    """The rate when ``done`` (0..1) of all steps are made.

    Triangular and cosine rise linearly over `WARM_UP` and fall to 0; the triangle is that of Smith 2017,
    "Cyclical Learning Rates", arXiv:1506.01186, with one cycle; the cosine is Loshchilov and Hutter 2017,
    arXiv:1608.03983.
    """
    if settings.schedule == "constant":
        return settings.learning_rate
    if done < WARM_UP:
        return settings.learning_rate * max(done / WARM_UP, 0.01)
    left = (1 - done) / (1 - WARM_UP)
    share = left if settings.schedule == "triangular" else (1 - math.cos(math.pi * left)) / 2
    return settings.learning_rate * share


@torch.no_grad()
def validate(learner: Learner, images: TrainingImages, device: torch.device) -> dict[str, float]:
    """The heads on the gallery split: cross-entropy of their mean logits (without a margin), and accuracy with its
    standard error.

    The error is that of a proportion with half an image added on either side (the prior of Jeffreys), so that
    a gallery without a mistake is not taken for proof that there are none.
    """
    learner.eval()
    count, right, total = 0, 0, 0.0
    for pixels, classes in images.gallery():
        classes = classes.to(device)
        logits = learner(pixels.to(device)).mean(dim=2)
        total += F.cross_entropy(logits, classes, reduction="none").double().sum().item()
        right += int((logits.argmax(dim=1) == classes).sum())
        count += len(classes)
    share = (right + 0.5) / (count + 1)
    return {
        "gallery_loss": total / count,
        "gallery_accuracy": right / count,
        "gallery_accuracy_error": math.sqrt(share * (1 - share) / (count + 1)),
    }
