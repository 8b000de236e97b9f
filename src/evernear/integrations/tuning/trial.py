"""One trial: train with the given settings, and measure the recognizer as it would be served."""

from collections.abc import Callable
from pathlib import Path

from evernear.data.shards import Dataset
from evernear.embedding.artifact import Epoch
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import export_network
from evernear.embedding.monitor import require_learned
from evernear.embedding.recipe import with_defaults
from evernear.embedding.train import train_network
from evernear.evaluation.measure import measure
from evernear.evaluation.recognizer import Recognizer
from evernear.evaluation.statistics import Proportion
from evernear.index.build import build_index
from evernear.settings import RunSettings


def measure_trial(
    dataset: Dataset, settings: RunSettings, directory: Path, report: Callable[[str], None]
) -> Proportion:
    """Measure the accuracy on the query split, from which neither network nor index was built. Not
    on the test split, so that the gate can judge the chosen settings on images that did not choose
    them. The features of a backbone that is not trained are cached in the dataset's store."""
    trained, network, embeddings, index = (directory / name for name in ("trained", "network", "embeddings", "index"))
    recipe = with_defaults(settings.train, dataset)

    def report_epoch(epoch: Epoch) -> None:
        report(f"epoch {epoch.epoch}/{recipe.epochs}, gallery accuracy {epoch.gallery_accuracy:.2%}")

    cache = dataset.store if recipe.keeps_backbone else None  # features of one trial serve the next ones
    result = train_network(dataset, recipe, trained, cache, on_epoch=report_epoch)
    if result.epochs:
        require_learned(result, recipe)
    export_network(trained, dataset, network, cache)
    embed_dataset(network, dataset, embeddings, store=cache)
    build_index(Embeddings.open(embeddings), dataset.labels, settings.index.temporary, index)
    measured, _ = measure(Recognizer.open(network, index, store=cache), dataset, "query")
    return measured.label_right
