"""The hash of the code behind a result changes with the code, and with nothing else."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from evernear.common import step_results as module
from evernear.common.step_results import code_digest
from evernear.data.ingest import DECODING_CODE
from evernear.embedding import CODE

NOT_DECODING = {"manifest", "sources"}
"""Modules that the decoding imports, but that do not change pixels."""


@pytest.fixture
def copied_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A copy of the package's files that `code_digest` reads."""
    copy = tmp_path / "evernear"
    shutil.copytree(module.ROOT, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(module, "ROOT", copy)
    code_digest.cache_clear()
    yield copy
    code_digest.cache_clear()


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("embedding/augmentation.py", True),
        ("data/shards.py", True),
        ("common/store/files.py", False),
        ("release/promotions.py", False),
    ],
)
def test_only_code_behind_the_result_changes_the_digest(copied_package: Path, file: str, changes: bool) -> None:
    before = code_digest(CODE)
    path = copied_package / file
    path.write_text(f"{path.read_text()}\nX = 1\n")
    code_digest.cache_clear()
    assert (code_digest(CODE) != before) is changes


def test_version_of_a_library_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_digest(CODE, ("pillow",))
    assert before != code_digest(CODE)
    monkeypatch.setattr(module, "version", lambda _: "0.0.1")
    code_digest.cache_clear()
    assert code_digest(CODE, ("pillow",)) != before
    code_digest.cache_clear()


def test_all_files_that_decode_are_listed() -> None:
    for file in DECODING_CODE:
        imports = re.findall(r"^\s*from evernear\.data\.(\w+)", (module.ROOT / file).read_text(), re.MULTILINE)
        assert {f"data/{name}.py" for name in {*imports} - NOT_DECODING} <= {*DECODING_CODE}
