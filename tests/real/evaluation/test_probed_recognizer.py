"""The recognizers of the open-set probe are those that a run would export, without some classes."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from evernear.common.store import open_store
from evernear.embedding import head as head_module
from evernear.embedding.embed import ExportedEmbedder, embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import export_network
from evernear.embedding.recipe import Recipe, with_defaults
from evernear.embedding.train import train_network
from evernear.evaluation import probe
from evernear.evaluation.probe import choose_opener, probe_open_set
from evernear.index.build import build_index
from evernear.index.search import Gallery
from evernear.settings import EvaluationSettings, IndexSettings, TrainSettings
from tests.releases import System


@pytest.fixture(scope="module")
def pretrained(system: System, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    import timm

    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(timm.create_model("test_resnet", num_classes=0).state_dict(), path)
    options = {"embedding_dim": 32, "min_steps": 60, "epochs": 1}
    settings = TrainSettings(backbone="test_resnet", weights=str(path), backbone_size_px=16, **options)
    return with_defaults(settings, system.dataset, views=1)


@pytest.mark.parametrize("frozen", [True, False])
def test_it_embeds_as_the_exported_network(
    system: System, pretrained: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    monkeypatch.setattr(head_module, "MAX_LOSS_ERRORS", math.inf)  # use the head, which gains nothing on random weights
    dataset, store = system.dataset, open_store((tmp_path / "store").as_uri())
    recipe, index, held_out = pretrained.model_copy(update={"frozen": frozen}), IndexSettings(k=1), frozenset("37")
    recognizer = choose_opener(dataset, recipe, index, None, store)(held_out)

    trained, network, embeddings = (tmp_path / name for name in ("trained", "network", "embeddings"))
    train_network(dataset, recipe, trained, store, exclude_labels=held_out)
    exported = export_network(trained, dataset, network, store)
    embed_dataset(network, dataset, embeddings, store=store)
    build_index(Embeddings.open(embeddings), dataset.labels, index, tmp_path / "index", held_out)
    gallery, embedder = Gallery.open(tmp_path / "index", exported.sha256), ExportedEmbedder(network, store)

    assert (recognizer.gallery.label_indices == gallery.label_indices).all()
    for shard in dataset.shards("test"):
        pairs = zip(
            recognizer.embed([(dataset.shard_blocks(shard, 64), shard.count)]),
            embedder.embed([(dataset.shard_blocks(shard, 64), shard.count)]),
            strict=True,
        )
        for (block, eager), (_, served) in pairs:
            assert eager.shape == (len(block), exported.embedding_dim)
            np.testing.assert_allclose(eager, served, atol=1e-5)
            probed, searched = recognizer.gallery.search(eager, 1), gallery.search(served, 1)
            np.testing.assert_allclose(probed.distances, searched.distances, atol=1e-4)


def test_no_draw_of_a_kept_backbone_is_exported(
    system: System, pretrained: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing and reading TorchScript would take longer than training a head."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("exported")

    monkeypatch.setattr(probe, "export_network", fail)
    store = open_store((tmp_path / "store").as_uri())
    measured = probe_open_set(system.dataset, pretrained, EvaluationSettings(), IndexSettings(k=1), store=store)
    assert measured.draws == 5
    assert len(measured.held_out) == 10
