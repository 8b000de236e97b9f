"""Accuracy of the deployed system, over seeds:
``python benchmarks/accuracy.py --source mnist``.

Each run goes through the functions of the pipeline's steps: ingest, train, export, embed, index,
measure. Settings were chosen with ``--split query``, from which no network or index was built;
``--split test``, the default, is for the numbers in the README.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from scipy.stats import t

from benchmarks import machine
from evernear.data.ingest import ingest_source
from evernear.data.manifest import save_manifest
from evernear.data.shards import Dataset
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import export_network
from evernear.embedding.train import train_network
from evernear.evaluation.measure import Measurement, measure
from evernear.evaluation.open_set import OpenSet
from evernear.evaluation.recognizer import Recognizer
from evernear.index.build import build_index
from evernear.settings import Settings, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="mnist", help="a source of `evernear run`: mnist or mnist:DIRECTORY")
    parser.add_argument("--presets", nargs="+", default=["default", "best"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--split", choices=["test", "query"], default="test")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()

    machine_info, runs = machine.describe(), []
    with tempfile.TemporaryDirectory() as scratch:
        for preset in arguments.presets:
            dataset = ingest_dataset(arguments.source, Path(scratch) / preset, preset, *arguments.set)
            for seed in arguments.seeds:
                chosen = settings_of(preset, *arguments.set, f"train.seed={seed}")
                runs.append({"preset": preset, "seed": seed, **run(dataset, chosen, Path(scratch), arguments.split)})
                print(runs[-1], flush=True)
    summaries = [summarize(preset, [r for r in runs if r["preset"] == preset]) for preset in arguments.presets]
    if arguments.split == "test" and not arguments.set:
        machine.write(
            "accuracy",
            "Accuracy of the deployed system, over three seeds",
            machine_info,
            {"summaries": summaries, "runs": runs},
            table(summaries),
        )
    else:
        print(*summaries, sep="\n")


def settings_of(preset: str, *overrides: str) -> Settings:
    return load(preset=None if preset == "default" else preset, environment={}, overrides=overrides)


def ingest_dataset(source: str, scratch: Path, preset: str = "default", *overrides: str) -> Dataset:
    settings = settings_of(preset, *overrides, f"data.source={source}")
    store_uri = (scratch / "store").as_uri()
    save_manifest(ingest_source(settings.data, store_uri, max_size_px=settings.max_size_px), scratch)
    return Dataset.open(scratch)


def run(
    dataset: Dataset, settings: Settings, scratch: Path, split: Any, open_set: OpenSet | None = None
) -> dict[str, Any]:
    """Train, index and measure; ``open_set`` is the result of the probe, which determines the
    threshold."""
    trained, network, embeddings, index = (scratch / n for n in ("trained", "network", "embeddings", "index"))
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    history = train_network(dataset, settings.train, trained)
    timing = {
        "train_s": round(time.perf_counter() - started_s, 1),
        "train_cpu_s": round(time.process_time() - started_cpu_s, 1),
    }
    export_network(trained, dataset, network)
    embed_dataset(network, dataset, embeddings)
    build_index(
        Embeddings.open(embeddings),
        dataset.labels,
        settings.index,
        index,
        threshold=open_set.threshold if open_set else None,
        relative_threshold=open_set.relative_threshold if open_set else None,
    )
    measurement, _ = measure(Recognizer.open(network, index), dataset, split)
    return {**timing, "epochs": len(history.epochs), **metrics(measurement)}


def metrics(measurement: Measurement) -> dict[str, Any]:
    return {
        "accuracy": measurement.label_right.value,
        "accuracy_low": measurement.label_right.low,
        "accuracy_high": measurement.label_right.high,
        "queries": measurement.label_right.total,
        "recall_at_5": measurement.recall_at_5.value,
        "called_unknown": measurement.false_rejects.value if measurement.false_rejects else None,
        "parity_max_abs_difference": measurement.parity_max_abs_difference,
    }


def mean_interval(values: list[float]) -> tuple[float, float, float]:
    """The mean over seeds, and its 95% interval by Student's t; for a single seed, the interval is
    the mean itself."""
    mean = statistics.mean(values)
    if len(values) == 1:
        return mean, mean, mean
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def summarize(preset: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    values = [run["accuracy"] for run in runs]
    mean, low, high = mean_interval(values)
    return {
        "preset": preset,
        "seeds": len(values),
        "queries": runs[0]["queries"],
        "mean_accuracy": mean,
        "low": low,
        "high": min(high, 1.0),
        "lowest": min(values),
        "mean_train_s": statistics.mean(run["train_s"] for run in runs),
    }


def table(summaries: list[dict[str, Any]]) -> list[list[str]]:
    heading = ["settings", "accuracy, mean of seeds", "95% interval", "lowest seed", "training"]
    return [heading] + [
        [
            str(s["preset"]),
            f"{s['mean_accuracy']:.2%} of {s['queries']:,} ({s['seeds']} seeds)",
            f"{s['low']:.2%} to {s['high']:.2%}",
            f"{s['lowest']:.2%}",
            f"{s['mean_train_s']:.0f} s",
        ]
        for s in summaries
    ]


if __name__ == "__main__":
    main()
