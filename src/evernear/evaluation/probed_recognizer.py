"""The recognizers that the open-set probe measures. Each lacks some of the classes, and is
discarded after the measurement."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from evernear.common.store import Store
from evernear.data.gallery import joining_gallery
from evernear.data.manifest import SPLITS
from evernear.data.shards import Dataset
from evernear.embedding.data_loader import TrainingImages
from evernear.embedding.embed import Embed, ExportedEmbedder, embed_dataset, write_embeddings
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import centered_head, export_network
from evernear.embedding.freeze import Pretrained, fit_last_layer, open_pretrained
from evernear.embedding.recipe import Recipe
from evernear.embedding.train import OnStep, steps_of_head, train_network
from evernear.index.build import build_index
from evernear.index.search import Gallery
from evernear.settings import IndexSettings


class ProbedRecognizer(NamedTuple):
    """A network's gallery, and a function that embeds queries with the network."""

    gallery: Gallery
    embed: Embed


def choose_opener(
    dataset: Dataset, recipe: Recipe, settings: IndexSettings, on_step: OnStep | None, store: Store | None
) -> Callable[[frozenset[str]], ProbedRecognizer]:
    """Return a function that takes a set of labels and makes a recognizer without them."""
    if not recipe.keeps_backbone:
        return partial(_open_trained, dataset, recipe, settings, on_step)
    pretrained = open_pretrained(dataset, recipe, store)
    pretrained.features.compute(dataset, SPLITS)
    return partial(_open_head, dataset, recipe, settings, on_step, pretrained)


def _open_trained(
    dataset: Dataset, recipe: Recipe, settings: IndexSettings, on_step: OnStep | None, held_out: frozenset[str]
) -> ProbedRecognizer:
    """Train a network. Its files and embeddings are discarded."""
    with TemporaryDirectory(prefix="evernear-probe-") as scratch:
        trained, network, embeddings, index = (Path(scratch) / step for step in ("train", "export", "embed", "index"))
        train_network(dataset, recipe, trained, exclude_labels=held_out, on_step=on_step)
        sha256 = export_network(trained, dataset, network).sha256
        embed_dataset(network, dataset, embeddings)
        embedder = ExportedEmbedder(network)
        embedder.load()
        return ProbedRecognizer(_index(embeddings, dataset, settings, index, held_out, sha256), embedder.embed)


def _open_head(
    dataset: Dataset,
    recipe: Recipe,
    settings: IndexSettings,
    on_step: OnStep | None,
    pretrained: Pretrained,
    held_out: frozenset[str],
) -> ProbedRecognizer:
    """Fit the last layer of a pretrained network. It is not exported, because that would take
    longer than the training."""
    from evernear.embedding.features import HeadEmbedder  # timm takes seconds to import

    images = TrainingImages(dataset, held_out)
    fit_last_layer(pretrained, dataset, images, recipe, steps_of_head(on_step))
    head = centered_head(pretrained.network, pretrained.features, dataset, held_out)
    embed, dim = HeadEmbedder(pretrained.features, head).embed, head.standardize.matrix.shape[1]
    joining = joining_gallery(dataset.manifest, frozenset(dataset.labels))
    with TemporaryDirectory(prefix="evernear-probe-") as scratch:
        embeddings, index = (Path(scratch) / step for step in ("embed", "index"))
        write_embeddings(embed, dim, dataset, embeddings, joining, pretrained.features.identity)
        return ProbedRecognizer(
            _index(embeddings, dataset, settings, index, held_out, pretrained.features.identity), embed
        )


def _index(
    embeddings: Path,
    dataset: Dataset,
    settings: IndexSettings,
    out_dir: Path,
    held_out: frozenset[str],
    network_sha256: str,
) -> Gallery:
    build_index(Embeddings.open(embeddings), dataset.labels, settings.temporary, out_dir, held_out)
    return Gallery.open(out_dir, network_sha256)
