"""Transfer of a pretrained backbone to classes that it has not seen, against logistic regression on the same features.

``python benchmarks/pretrained.py --source DIRECTORY --new frog horse ship truck`` with class folders in
``DIRECTORY/train`` and ``DIRECTORY/test``. A resnet18 is pretrained on all classes but the new ones. Its weights then
recognize the new classes from a few images each: frozen, and fine-tuned. The logistic regression (scikit-learn) sees
the features of the same images as the frozen backbone's gallery; its regularization is chosen by cross-validation.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import machine
import numpy as np
from accuracy import ingested, run, settings_of
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegressionCV

from evernear.data.manifest import Split
from evernear.embedding.embed import embed
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.train import train

BACKBONE = ("train.backbone=resnet18", "train.backbone_size_px=64")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, type=Path, help="a directory with train/ and test/")
    parser.add_argument("--new", required=True, nargs="+", help="classes that the pretraining does not see")
    parser.add_argument("--images", type=int, default=100, help="training images of each new class")
    parser.add_argument("--epochs", type=int, default=5, help="of the pretraining")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()

    machine_info = machine.describe()
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        weights = pretrain(arguments.source, frozenset(arguments.new), arguments.epochs, scratch)
        runs: list[dict[str, Any]] = []
        for seed in arguments.seeds:
            images = scratch / f"new-{seed}"
            sample(arguments.source, arguments.new, arguments.images, seed, images)
            runs.append({"seed": seed, **transfer(images, weights, seed, scratch / str(seed))})
            print(runs[-1], flush=True)
    table = [["classifier of the new classes", *(f"seed {row['seed']}" for row in runs), "mean"]]
    for name in ("frozen", "logistic_regression", "fine_tuned"):
        values = [row[name] for row in runs]
        table.append([name.replace("_", " "), *(f"{v:.1%}" for v in values), f"{sum(values) / len(values):.1%}"])
    parameters = {"new": arguments.new, "images_per_class": arguments.images, "pretraining_epochs": arguments.epochs}
    machine.write("pretrained", machine_info, {**parameters, "runs": runs}, table)


def pretrain(source: Path, new: frozenset[str], epochs: int, scratch: Path) -> Path:
    """Train a backbone on all classes but ``new``; return the file of its weights."""
    dataset = ingested(f"folder:{source}", scratch / "old")
    settings = settings_of("default", *BACKBONE, f"train.epochs={epochs}", "train.min_steps=0").train
    train(dataset, settings, scratch / "pretrained", exclude_labels=new)
    return scratch / "pretrained" / "weights.pt"


def sample(source: Path, labels: list[str], images_per_class: int, seed: int, out_dir: Path) -> None:
    """Link a random sample of the training images of ``labels``, and all their test images, to ``out_dir``."""
    generator = np.random.default_rng(seed)
    for label in labels:
        files = sorted((source / "train" / label).iterdir())
        chosen = [files[i] for i in generator.permutation(len(files))[:images_per_class]]
        for split, members in (("train", chosen), ("test", sorted((source / "test" / label).iterdir()))):
            (out_dir / split / label).mkdir(parents=True)
            for file in members:
                (out_dir / split / label / file.name).symlink_to(file.absolute())


def transfer(images: Path, weights: Path, seed: int, scratch: Path) -> dict[str, float]:
    """Test accuracy of the three classifiers on the classes in ``images``."""
    pretrained = (*BACKBONE, f"train.weights={weights}", f"train.seed={seed}")
    dataset = ingested(f"folder:{images}", scratch)
    frozen = run(dataset, settings_of("default", *pretrained, "train.frozen=true"), scratch, "test")
    embed(scratch / "network", dataset, scratch / "features", splits=("gallery", "test"))
    regression = logistic_regression(Embeddings.open(scratch / "features"))
    fine_tuned = run(dataset, settings_of("default", *pretrained), scratch / "tuned", "test")
    return {
        "frozen": frozen["accuracy"],
        "logistic_regression": regression,
        "fine_tuned": fine_tuned["accuracy"],
    }


def logistic_regression(features: Embeddings) -> float:
    """Test accuracy of a logistic regression that is fitted to the gallery."""
    gallery, labels = rows(features, "gallery")
    model = LogisticRegressionCV(cv=5, max_iter=2000, scoring="accuracy", use_legacy_attributes=False)
    return float(model.fit(gallery, labels).score(*rows(features, "test")))


def rows(features: Embeddings, split: Split) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The embeddings (N, D) and label numbers (N,) of ``split``."""
    blocks = list(features.blocks(split))
    return np.concatenate([block.embeddings for block in blocks]), np.concatenate([block.labels for block in blocks])


if __name__ == "__main__":
    main()
