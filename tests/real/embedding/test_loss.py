"""A loss of one's own trains the network, and its code decides whether a checkpoint is reused."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from evernear.data.shards import Dataset
from evernear.embedding.artifact import load_trained
from evernear.embedding.data_loader import PAIRED_IMAGES, TrainingImages
from evernear.embedding.loss import build_loss, loss_sha256
from evernear.embedding.train import train_network
from evernear.embedding.training_setup import checkpoint_key
from evernear.errors import SettingsError, TrainingError
from evernear.settings import TrainSettings
from evernear.triggers.slack.prompts import RETRAIN_PARAMETERS
from tests.real.embedding.conftest import TINY
from tests.real.scenarios.workspace import write_digits
from tests.small_ingest import dataset_of

HERE = __name__


class Pairs(nn.Module):
    """Softmax over the other images of the batch (Khosla et al. 2020, "Supervised Contrastive
    Learning", arXiv:2004.11362)."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        itself = torch.eye(len(labels), dtype=torch.bool)
        similarity = (embeddings @ embeddings.T / 0.1).masked_fill(itself, -1e4)
        same = (labels[:, None] == labels) & ~itself
        return -(F.log_softmax(similarity, dim=1) * same).sum(dim=1).div(same.sum(dim=1).clamp_min(1)).mean()


class Centers(nn.Module):
    def __init__(self, classes: int, dim: int) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(classes, dim))

    def logits(self, embeddings: Tensor) -> Tensor:
        return 10 * embeddings @ F.normalize(self.centers).T

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(embeddings), labels)


def pairs(classes: int, dim: int) -> nn.Module:
    return Pairs()


def centers(classes: int, dim: int) -> nn.Module:
    return Centers(classes, dim)


def not_a_module(classes: int, dim: int) -> int:
    return classes


def broken(classes: int, dim: int) -> nn.Module:
    raise ValueError("odd dimension")


@pytest.mark.slow
@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("function", ["pairs", "centers"])
def test_loss_of_ones_own_trains_the_network(digits: Dataset, tmp_path: Path, function: str, members: int) -> None:
    settings = TINY.model_copy(update={"loss": f"{HERE}:{function}", "members": members, "min_steps": 100})
    result = train_network(digits, settings, tmp_path)
    assert result.best.gallery_accuracy > 0.8
    assert ("gallery accuracy of nearest neighbors" in result.summary()) == (function == "pairs")
    trained = load_trained(tmp_path)[0]
    assert trained.recipe.loss == settings.loss


def test_batches_for_pairs_have_several_images_of_each_class(digits: Dataset) -> None:
    images = TrainingImages(digits, frozenset({"3"}))
    seen = Counter[bytes]()
    batches = images.paired_batches(32, seed=0, epoch=0)
    for _ in range(images.count // 32):
        pixels, classes = next(batches)
        assert (len(pixels), set(Counter(classes.tolist()).values())) <= (32, {4, 8, 12, 16, 20, 24, 28, 32})
        assert all(classes[:PAIRED_IMAGES] == classes[0])
        seen.update(image.numpy().tobytes() for image in pixels)
    assert max(seen.values()) <= 3, "the epoch repeats few images"
    assert len(seen) > 0.7 * images.count
    (again, _), (other, _) = next(images.paired_batches(32, 0, 0)), next(images.paired_batches(32, 0, 1))
    first, _ = next(images.paired_batches(32, 0, 0))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_gallery_without_pairs_cannot_measure_a_loss_of_pairs(tmp_path: Path) -> None:
    write_digits(tmp_path / "source", "0123456789", per_class=8)
    dataset = dataset_of(tmp_path / "source", tmp_path / "store", gallery_fraction=0.1, query_fraction=0.1)
    assert set(dataset.manifest.label_counts("gallery").values()) == {1}
    with pytest.raises(TrainingError, match="alone in its class"):
        train_network(dataset, TINY.model_copy(update={"loss": f"{HERE}:pairs"}), tmp_path / "out")


def test_source_of_the_loss_is_in_the_key_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "loss_whose_source_changes.py"
    settings = TINY.model_copy(update={"loss": f"{file.stem}:pairs"})
    keys: list[str] = []
    for text in ("pairs = print\n", "pairs = repr\n", "pairs = print\n"):
        file.write_text(text)
        keys.append(checkpoint_key("digest", settings, frozenset()))
    assert keys[0] == keys[2] != keys[1]
    assert loss_sha256("arcface") is None


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        ("no_such_module:loss", "cannot be imported: ModuleNotFoundError: .* Put the module on PYTHONPATH"),
        (f"{HERE}:no_such_function", "cannot be imported: AttributeError: .*no_such_function"),
        (f"{HERE}:not_a_module", "returned a int, not a torch.nn.Module"),
        (f"{HERE}:broken", r"failed for 10 classes and 16 dimensions: ValueError: odd dimension\."),
    ],
)
def test_unusable_loss_is_refused_in_one_sentence(loss: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence) as info:
        build_loss(loss, 10, 16)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        ({"loss": "os.system"}, "should match pattern"),
        ({"loss": "a:b", "scale": 16.0}, "margin and scale are ArcFace's"),
        ({"loss": "a:b", "margin": 0.5}, "margin and scale are ArcFace's"),
        ({"loss": "a:b", "weights": "hub"}, "set layers=all"),
        ({"loss": "a:b", "processes": 2}, "set processes=1"),
    ],
)
def test_settings_that_do_not_fit_the_loss_are_refused(chosen: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        TrainSettings.model_validate(chosen)


def test_nobody_names_a_loss_in_slack() -> None:
    assert "train.loss" not in RETRAIN_PARAMETERS
