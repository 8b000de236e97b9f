"""The hash of the code behind a result changes with the code, and with nothing else."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evernear.common import code_digest as module
from evernear.common.code_digest import code_digest

TRAINING = "evernear.embedding.train"
Edit = Callable[[str, str, str], None]


@pytest.fixture
def edit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Edit]:
    """Replace text in the source of a module, as `code_digest` reads it."""
    original = module._source
    edited: dict[str, Path] = {}

    def replace(name: str, old: str, new: str) -> None:
        source = original(name)
        assert source is not None
        text = source.read_text()
        assert old in text
        edited[name] = tmp_path / f"{name}.py"
        edited[name].write_text(text.replace(old, new))
        code_digest.cache_clear()

    monkeypatch.setattr(module, "_source", lambda name: edited.get(name) or original(name))
    code_digest.cache_clear()
    yield replace
    code_digest.cache_clear()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("evernear.embedding.augmentation", "return ", "return 1 * "),
        ("evernear.embedding.recipe", "WARM_UP = 0.2", "WARM_UP = 0.3"),
        ("evernear.data.shards", "_CHUNK_BYTES = 256", "_CHUNK_BYTES = 512"),
        ("evernear.data.preprocess", "BAR_VALUE = 128", "BAR_VALUE = 127"),
    ],
)
def test_changed_code_changes_the_digest(edit: Edit, name: str, old: str, new: str) -> None:
    before = code_digest(TRAINING)
    edit(name, old, new)
    assert code_digest(TRAINING) != before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("evernear.embedding.recipe", '"""Momentum of Muon', '"""The momentum of Muon'),
        ("evernear.embedding.recipe", "WARM_UP = 0.2", "# A comment.\nWARM_UP =   0.2"),
        ("evernear.common.store.files", "24 * 3600", "48 * 3600"),
        ("evernear.release.promotions", "300.0", "400.0"),
    ],
)
def test_text_and_unrelated_code_do_not_change_it(edit: Edit, name: str, old: str, new: str) -> None:
    before = code_digest(TRAINING)
    edit(name, old, new)
    assert code_digest(TRAINING) == before


def test_version_of_a_library_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_digest(TRAINING, ("pillow",))
    assert before != code_digest(TRAINING)
    monkeypatch.setattr(module, "version", lambda _: "0.0.1")
    code_digest.cache_clear()
    assert code_digest(TRAINING, ("pillow",)) != before
    code_digest.cache_clear()


def test_nothing_is_imported_to_read_its_source() -> None:
    script = f"import sys; from {module.__name__} import code_digest; code_digest({TRAINING!r}); print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert {TRAINING, "torch", "timm"}.isdisjoint(output.split())
