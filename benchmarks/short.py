"""A short run for a pull request: ``python benchmarks/short.py`` prints Markdown.

scikit-learn's digits, so nothing is downloaded: how accurate the system is as it is served, and how fast it embeds
compared with the plain scripted network. 203 test images cannot tell 99.5% from 99.0%; they only show that something
broke.
"""

import tempfile
from pathlib import Path

import accuracy
import embed_gallery
import machine

SOURCE = "digits"


def main() -> None:
    machine_info = machine.describe()
    with tempfile.TemporaryDirectory() as scratch:
        measured = measured_accuracy(Path(scratch))
        large_gallery = accuracy.ingested(
            SOURCE, Path(scratch), "default", f"data.gallery_fraction={embed_gallery.GALLERY_FRACTION}"
        )
        settings = accuracy.settings_of("default")
        compared = embed_gallery.compared(large_gallery, settings, Path(scratch), repeats=3)
    print(f"### evernear on {SOURCE}, {machine_info['cores']} cores, torch {machine_info['torch']}\n")
    print(machine.markdown(accuracy.table([measured])))
    print(machine.markdown(embed_gallery.table([{"preset": "default", **compared}])))


def measured_accuracy(scratch: Path) -> dict[str, object]:
    dataset = accuracy.ingested(SOURCE, scratch / "accuracy")
    runs = [
        accuracy.run(dataset, accuracy.settings_of("default", f"train.seed={seed}"), scratch, "test") for seed in (0, 1)
    ]
    return accuracy.summarize("default", runs)


if __name__ == "__main__":
    main()
