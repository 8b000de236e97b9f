"""The table of answers to test images: its rows, its kinds, and its format."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evernear.common.frozen import FORMAT
from evernear.common.parquet import require_table_format
from evernear.data.shards import Block
from evernear.errors import FormatError, IntegrityError
from evernear.evaluation.answer_table import AnswerTable, AnswerWriter
from evernear.evaluation.corrected import CorrectedCounter
from evernear.evaluation.measure import AnsweredBlock
from evernear.index.search import Classifications, Neighbors

LABELS = ("cat", "dog")


def answered() -> AnsweredBlock:
    """Images named right, wrong (twice, the second nearer) and unknown, with the label `dog`."""
    count = 4
    digests = np.arange(count * 32, dtype=np.uint8).reshape(count, 32)
    block = Block(np.zeros((count, 2, 2, 1), np.uint8), np.ones(count, np.int64), np.arange(count), digests)
    answers = np.array([1, 0, 0, 1], np.int32)
    distances = np.array([0.1, 0.5, 0.3, 1.05], np.float32)
    unknown = np.array([False, False, False, True])
    rows = np.tile(np.array([3, 1, -1], np.int64), (count, 1))
    near = Neighbors(np.tile(answers[:, None], 3), np.tile(distances[:, None], 3), rows)
    return AnsweredBlock(block, np.zeros((count, 8), np.float32), near, Classifications(answers, distances, unknown))


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    with AnswerWriter(tmp_path / "answers.parquet", LABELS) as writer:
        writer.add(answered())
        writer.add(answered())
    return (tmp_path / "answers.parquet").read_bytes()


def test_rows_are_in_the_order_of_the_split_and_kinds_begin_with_the_most_certain(data: bytes) -> None:
    table = AnswerTable(data, "a table")
    assert table.rows.num_rows == 8
    assert table.of("named wrong", 1.0) == [2, 6, 1, 5]
    assert table.of("called unknown", 1.0) == [3, 7]
    assert table.of("near the threshold", 1.0) == [3, 7]
    row = table.row(5)
    assert (row["label"], row["answer"], row["unknown"], row["neighbors"]) == ("dog", "cat", False, [3, 1, -1])
    assert row["digest"] == bytes(range(32, 64))


def test_table_of_another_version_or_a_damaged_one_is_refused(data: bytes, tmp_path: Path) -> None:
    require_table_format(data, "a table")
    later = pq.read_table(pa.BufferReader(data)).replace_schema_metadata({"evernear": f'{{"format": {FORMAT + 1}}}'})
    pq.write_table(later, tmp_path / "later.parquet")
    with pytest.raises(FormatError, match="a table is of another version"):
        AnswerTable((tmp_path / "later.parquet").read_bytes(), "a table")
    with pytest.raises(IntegrityError, match="a table is not a valid Parquet file"):
        AnswerTable(data[:100], "a table")


def test_answers_to_corrected_images_are_counted_apart() -> None:
    counter = CorrectedCounter([bytes(range(32)), bytes(range(32, 64)), bytes(32)])
    counter.add(answered())
    counts = counter.counts()
    assert counts is not None
    assert (counts.named_right, counts.named_wrong, counts.called_unknown) == (1, 1, 0)
    none = CorrectedCounter([])
    none.add(answered())
    assert none.counts() is None
