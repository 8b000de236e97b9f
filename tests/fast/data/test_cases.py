"""Folders after public bug reports of neighboring tools, where ``../shared`` has them: no image is
lost in silence."""

import tarfile
from pathlib import Path

import pytest

from evernear.common.store import open_store
from evernear.data.manifest import Manifest
from evernear.data.shards import Dataset
from evernear.data.validate import validate_dataset
from evernear.errors import DataError
from evernear.settings import ValidationSettings
from tests import ROOT

CASES = ROOT.parent / "shared" / "cases" / "cases.tar.gz"
EXPECTED = {
    "01-symlinked-subfolder/images": ({"birds": 20, "cats": 50, "dogs": 20}, {"outside_link"}),
    "01-symlinked-subfolder/images2": ({"cats": 30, "dogs": 20}, {"outside_link"}),
    "01-symlinked-subfolder/images3": ({"cats": 30, "dogs": 20}, {"outside_link"}),
    "01-symlinked-subfolder/images4": ({"apple": 40, "newclass": 30, "pear": 40, "plum": 40}, {"outside_link"}),
    "02-nfc-nfd/case": ({"Apple": 14, "apple": 14, "pear": 28}, {"similar_classes", "merged_folders"}),
    "02-nfc-nfd/images": ({"caf\xe9": 28, "th\xe9": 14}, {"merged_folders"}),
    "02-nfc-nfd/split": ({"caf\xe9": 40, "plum": 40}, {"merged_folders"}),
    "04-class-first/images": ({"cat": 24, "dog": 24}, set()),
    "04-class-first/nested": ({"fruit": 30, "veg": 30}, {"nested_folder"}),
    "06-gray16/eight-bit-values": ({"cracked": 16, "intact": 16}, set()),
    "06-gray16/ten-bit": ({"cracked": 16, "intact": 16}, set()),
    "06-gray16/twelve-bit": ({"cracked": 16, "intact": 16}, set()),
    "12-suffixes/images": ({"cat": 30, "dog": 30}, set()),
    "13-litter/ipynb": ({"cat": 14, "dog": 14}, {"litter"}),
    "13-litter/lostfound": ({"cat": 14, "dog": 14}, {"litter"}),
    "13-litter/macosx": ({"cat": 14, "dog": 14}, {"litter"}),
    "13-litter/recycle": ({"cat": 14, "dog": 14}, {"litter"}),
    "13-litter/synology": ({"cat": 14, "dog": 14}, {"litter"}),
    "13-litter/synology-top": ({"cat": 14, "dog": 14}, {"litter"}),
}
"""Images by class, and the rules of the findings, by the folder of a case."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not CASES.exists():
        pytest.skip("The cases are not here.")
    directory = tmp_path_factory.mktemp("cases")
    with tarfile.open(CASES) as archive:
        archive.extractall(directory, filter="tar")  # some names and links are meant to be unusual
    return directory


@pytest.mark.parametrize("case", EXPECTED)
def test_every_image_is_used_and_what_is_unusual_is_said(cases: Path, run_ingest, case: str) -> None:
    manifest = run_ingest(cases / case)
    dataset = Dataset(manifest, open_store(manifest.store_uri))
    report = validate_dataset(dataset, ValidationSettings())
    images, findings = EXPECTED[case]
    assert _images_by_class(manifest) == images
    assert {finding.rule for finding in report.findings} == findings
    assert not [finding for finding in report.findings if finding.severity == "error"]


def test_given_test_images_below_the_classes_are_the_test_split(cases: Path, run_ingest) -> None:
    assert run_ingest(cases / "04-class-first/images").count("test") == 20


def test_unknown_split_folder_is_asked_about(cases: Path, run_ingest) -> None:
    with pytest.raises(DataError, match=r"--set data\.split_folders\.eval=test, or add --set data\.layout=classes"):
        run_ingest(cases / "03-train-eval/images")


def _images_by_class(manifest: Manifest) -> dict[str, int]:
    counts: dict[str, int] = {}
    for shard in manifest.shards:
        for label, count in shard.label_counts.items():
            counts[label] = counts.get(label, 0) + count
    return dict(sorted(counts.items()))
