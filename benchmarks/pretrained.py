"""Transfer of a pretrained backbone to new classes,
compared with logistic regression on the same features.

``python benchmarks/pretrained.py --source DIRECTORY --new frog horse ship truck`` with
class folders in ``DIRECTORY/train`` and ``DIRECTORY/test``. A resnet18 is pretrained on
all classes but the new ones. Its weights then recognize the new classes from a few
images each: frozen, by vote of the nearest neighbors, and fine-tuned. Two logistic
regressions of scikit-learn train on the images of the frozen backbone's gallery: one on
its features, each divided by its standard deviation, and one on the embeddings, which
are whitened. Cross-validation chooses their regularization.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegressionCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks import machine
from benchmarks.accuracy import ingest_dataset, run, settings_of
from evernear.data.manifest import Split
from evernear.data.shards import Dataset
from evernear.embedding.artifact import load_trained
from evernear.embedding.data_loader import TrainingImages
from evernear.embedding.timm_member import TimmMember
from evernear.embedding.train import train_network

BACKBONE = ("train.backbone=resnet18", "train.backbone_size_px=64")
CLASSIFIERS = {
    "frozen": "frozen, nearest neighbors",
    "regression_on_features": "logistic regression on the features",
    "regression_on_embeddings": "logistic regression on the embeddings",
    "fine_tuned": "fine-tuned",
}
Features = NDArray[np.float32]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, type=Path, help="a directory with train/ and test/")
    parser.add_argument("--new", required=True, nargs="+", help="classes that are excluded from pretraining")
    parser.add_argument("--images", type=int, default=100, help="training images of each new class")
    parser.add_argument("--test-images", type=int, help="test images of each new class; all by default")
    parser.add_argument("--pretraining-images", type=int, help="training images of each other class; all by default")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of pretraining")
    parser.add_argument("--weights", type=Path, help="directory of the pretrained weights, reused if present")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="settings of fine-tuning"
    )
    arguments = parser.parse_args()

    machine_info = machine.describe()
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        weights = arguments.weights or scratch / "weights.pt"
        if not weights.exists():
            old = sorted({folder.name for folder in (arguments.source / "train").iterdir()}.difference(arguments.new))
            sample(arguments.source, old, (arguments.pretraining_images, 1), 0, scratch / "old-images")
            pretrain(scratch / "old-images", arguments.epochs, scratch / "old").replace(weights)
        runs: list[dict[str, Any]] = []
        for seed in arguments.seeds:
            images = scratch / f"new-{seed}"
            sample(arguments.source, arguments.new, (arguments.images, arguments.test_images), seed, images)
            runs.append({"seed": seed, **transfer(images, weights, seed, arguments.set, scratch / str(seed))})
            print(runs[-1], flush=True)
    table = [["classifier of the new classes", *(f"seed {row['seed']}" for row in runs), "mean"]]
    for name, words in CLASSIFIERS.items():
        values = [row[name] for row in runs]
        table.append([words, *(f"{value:.1%}" for value in values), f"{statistics.mean(values):.1%}"])
    parameters = {name: value for name, value in vars(arguments).items() if name not in ("source", "weights", "seeds")}
    machine.write(
        "pretrained",
        "Transfer of a pretrained backbone to four new classes of CIFAR-10",
        machine_info,
        {**parameters, "runs": runs},
        table,
    )


def sample(source: Path, labels: list[str], counts: tuple[int | None, int | None], seed: int, out_dir: Path) -> None:
    """Link a random sample of the train and the test images of each of ``labels`` to
    ``out_dir``; None: all.
    """
    generator = np.random.default_rng(seed)
    for label in labels:
        for split, count in zip(("train", "test"), counts, strict=True):
            files = sorted((source / split / label).iterdir())
            (out_dir / split / label).mkdir(parents=True)
            for number in generator.permutation(len(files))[:count]:
                (out_dir / split / label / files[number].name).symlink_to(files[number].absolute())


def pretrain(images: Path, epochs: int, scratch: Path) -> Path:
    """Train a backbone on ``images``; return the file of its weights."""
    dataset = ingest_dataset(f"folder:{images}", scratch)
    settings = settings_of("default", *BACKBONE, f"train.epochs={epochs}", "train.min_steps=0").train
    train_network(dataset, settings, scratch / "pretrained")
    return scratch / "pretrained" / "weights.pt"


def transfer(images: Path, weights: Path, seed: int, fine_tuning: list[str], scratch: Path) -> dict[str, float]:
    """Test accuracy of the classifiers on the classes in ``images``."""
    pretrained = (*BACKBONE, f"train.weights={weights}", f"train.seed={seed}")
    dataset = ingest_dataset(f"folder:{images}", scratch)
    frozen = run(dataset, settings_of("default", *pretrained, "train.frozen=true"), scratch, "test")
    features, embeddings = zip(*embed(scratch / "trained", dataset), strict=True)
    tuning = settings_of("default", *pretrained, "train.layers=all", *fine_tuning)
    fine_tuned = run(dataset, tuning, scratch / "tuned", "test")
    return {
        "queries": frozen["queries"],
        "frozen": frozen["accuracy"],
        "regression_on_features": regression_accuracy(*features),
        "regression_on_embeddings": regression_accuracy(*embeddings),
        "fine_tuned": fine_tuned["accuracy"],
    }


Labeled = tuple[Features, NDArray[np.int64]]


@torch.inference_mode()
def embed(trained_dir: Path, dataset: Dataset) -> Iterator[tuple[Labeled, Labeled]]:
    """Features and embeddings (N, D) with their classes (N,),
    of the training and the test images.
    """
    network, images = load_trained(trained_dir)[1].eval(), TrainingImages(dataset, frozenset())
    member = cast(TimmMember, network.members[0])
    training: tuple[Split, ...] = ("train", "gallery")
    for splits in (training, ("test",)):
        batches = [batch for split in splits for batch in images.in_order(split)]
        features: list[torch.Tensor] = []
        handle = member.standardize.register_forward_hook(
            lambda _, inputs, __, features=features: features.append(inputs[0])
        )
        embeddings = torch.cat([network(pixels) for pixels, _ in batches]).numpy()
        handle.remove()
        classes = torch.cat([labels for _, labels in batches]).numpy()
        yield (torch.cat(features).numpy(), classes), (embeddings, classes)


def regression_accuracy(training: Labeled, test: Labeled) -> float:
    """Test accuracy of a logistic regression."""
    regression = LogisticRegressionCV(
        cv=5, max_iter=2000, scoring="accuracy", l1_ratios=(0,), use_legacy_attributes=False
    )
    return float(make_pipeline(StandardScaler(), regression).fit(*training).score(*test))


if __name__ == "__main__":
    main()
