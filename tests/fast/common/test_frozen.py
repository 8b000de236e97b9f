from pathlib import Path

import pytest

from evernear.common.frozen import Frozen
from evernear.errors import IntegrityError


class TrainingNote(Frozen):
    remedy = "run the train step again"

    epochs: int
    text: str = ""


def test_document_round_trip(tmp_path: Path) -> None:
    note = TrainingNote(epochs=3, text="\u20ac")
    note.save(tmp_path / "notes.json")
    assert TrainingNote.load(tmp_path / "notes.json") == note
    assert (tmp_path / "notes.json").read_bytes() == note.to_json()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "Cannot read {path}: No such file or directory; run the train step again."),
        (b"{", "{path} is not a valid training note: Invalid JSON: EOF while parsing"),
        (b"\xff", "{path} is not a valid training note: Invalid JSON: "),
        (
            b'{"epochs": "x", "later": 2}',
            "{path} is not a valid training note: epochs: Input should be a valid integer",
        ),
        (b'{"epochs": "x"}', "{path} is not a valid training note: epochs: Input should be a valid integer"),
    ],
)
def test_invalid_document_is_reported(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "notes.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(IntegrityError) as exc_info:
        TrainingNote.load(path)
    assert str(exc_info.value).startswith(sentence.format(path=path))
    assert str(exc_info.value).endswith("; run the train step again.")


def test_document_of_a_later_version_is_not_called_damaged() -> None:
    with pytest.raises(IntegrityError) as exc_info:
        TrainingNote.from_json(b'{"epochs": 1, "\\u001b": 2}', "notes.json")
    assert str(exc_info.value) == (
        "notes.json is not a valid training note for this version of evernear, which does not know the field \\x1b. If "
        "a later version wrote it, upgrade evernear here, servers before pipelines."
    )
