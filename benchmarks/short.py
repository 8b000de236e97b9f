"""A short run for a pull request: ``python benchmarks/short.py`` prints Markdown.

It measures the accuracy of the system as it is served, and the speed of embedding compared with the
plain scripted network, on scikit-learn's digits, so nothing is downloaded. 203 test images cannot
distinguish 99.5% from 99.0%; they only show that something broke.
"""

import tempfile
from pathlib import Path

from benchmarks import accuracy, embed_gallery, machine

SOURCE = "digits"


def main() -> None:
    machine_info = machine.describe()
    with tempfile.TemporaryDirectory() as scratch:
        summary = measure_accuracy(Path(scratch))
        large_gallery = accuracy.ingest_dataset(
            SOURCE, Path(scratch), "default", f"data.gallery_fraction={embed_gallery.GALLERY_FRACTION}"
        )
        settings = accuracy.settings_of("default")
        comparison = embed_gallery.compare(large_gallery, settings, Path(scratch), repeats=3)
    print(f"### evernear on {SOURCE}, {machine_info['cores']} cores, torch {machine_info['torch']}\n")
    print(machine.markdown(accuracy.table([summary])))
    print(machine.markdown(embed_gallery.table([{"preset": "default", **comparison}])))


def measure_accuracy(scratch: Path) -> dict[str, object]:
    dataset = accuracy.ingest_dataset(SOURCE, scratch / "accuracy")
    runs = [
        accuracy.run(dataset, accuracy.settings_of("default", f"train.seed={seed}"), scratch, "test") for seed in (0, 1)
    ]
    return accuracy.summarize("default", runs)


if __name__ == "__main__":
    main()
