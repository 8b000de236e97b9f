"""The release's answer to every test image, as a Parquet file in the record of the run that built
it. The console shows them as images."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evernear.common.disk import disk_errors
from evernear.common.parquet import require_table_format, stamped
from evernear.errors import IntegrityError

if TYPE_CHECKING:
    from evernear.evaluation.measure import AnsweredBlock

ANSWERS_FILE = "answers.parquet"
NEIGHBORS = 4
NEAR = 0.1
"""A distance that differs from the threshold by at most this share of it is near the threshold."""
Kind = Literal["named wrong", "called unknown", "near the threshold"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_REMEDY = "a new release writes its own"
_SCHEMA = pa.schema(
    [
        pa.field("digest", pa.binary(32), nullable=False),
        pa.field("label", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("distance", pa.float32(), nullable=False),
        pa.field("unknown", pa.bool_(), nullable=False),
        pa.field("neighbors", pa.list_(pa.int64()), nullable=False),  # rows of the gallery, nearest first
    ]
)


class AnswerWriter:
    """Observes the candidate's measurement (`evernear.evaluation.measure`), and writes a row for
    each image, in the order of the split. Memory does not grow with the number of images."""

    def __init__(self, path: Path, labels: tuple[str, ...]) -> None:
        self._path = path
        self._labels = np.array([*labels, ""], object)  # an answer of no label has the number -1
        self._writer = pq.ParquetWriter(path, stamped(_SCHEMA))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with disk_errors(self._path):
            self._writer.close()

    def add(self, answered: "AnsweredBlock") -> None:
        block, answers = answered.block, answered.answers
        columns = [
            [digest.tobytes() for digest in block.digests],
            self._labels[block.labels],
            self._labels[answers.labels],
            answers.distances.astype(np.float32),
            answers.unknown.astype(np.bool_),
            answered.neighbors.rows[:, :NEIGHBORS].astype(np.int64).tolist(),
        ]
        with disk_errors(self._path):
            self._writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))


class AnswerTable:
    """The rows of an `AnswerWriter`. The number of a row is its image's position in the test split
    of the release's snapshot."""

    def __init__(self, data: bytes, source: str) -> None:
        """Raises `FormatError` if another version wrote the table, `IntegrityError` if it is
        damaged."""
        require_table_format(data, source, _REMEDY)
        try:
            self.rows: pa.Table = pq.read_table(pa.BufferReader(data))
        except (pa.ArrowException, OSError) as error:
            raise IntegrityError(f"{source} is damaged: {error}; {_REMEDY}.") from None

    def of(self, kind: Kind, threshold: float) -> list[int]:
        """The numbers of the rows of one kind, the most certain answers first, so that those named
        wrong begin with the most surprising one."""
        distances, unknown = self._column("distance"), self._column("unknown")
        match kind:
            case "named wrong":
                chosen = (self._column("label") != self._column("answer")) & ~unknown
            case "called unknown":
                chosen = unknown
            case "near the threshold":
                chosen = np.abs(distances - threshold) <= NEAR * threshold
        numbers = np.flatnonzero(chosen)
        return numbers[np.argsort(distances[numbers], kind="stable")].tolist()

    def _column(self, name: str) -> NDArray[Any]:
        return self.rows[name].to_numpy()

    def row(self, number: int) -> dict[str, Any]:
        """Keyed by the names of the columns."""
        return self.rows.slice(number, 1).to_pylist()[0]
