"""The answers of candidate, champion and anchor to the test split, in parts
(`evernear.common.parts`).

A part is a range of whole shards. Its result is an object with one row for each query and system,
and with the images and embeddings of the few queries that the run page may show. The paired test
needs each query rather than a sum. `stored_answers` therefore reads the rows in the order of the
split, and `evernear.evaluation.evaluate` measures the same figures as without parts.

::

    <folder>/evaluate-<identity>/...              the plan, its parts and their results
    <folder>/evaluate-<identity>/<sha256>.npz     the answers of one part
    <folder>/evaluate-<identity>/candidate/...    network and index, if other machines run parts
"""

import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from evernear.common.disk import disk_errors, sha256_bytes, sha256_file
from evernear.common.frozen import Frozen
from evernear.common.parts import OpenWorker, Part, Parts, Worker
from evernear.common.store import Store
from evernear.data.shards import Block, Dataset
from evernear.evaluation.evaluate import SYSTEMS, Answered, ReleasedSystem, UnavailableSystem
from evernear.evaluation.example_collector import NEIGHBORS, queries_to_show
from evernear.evaluation.measure import RECALL_AT, AnsweredBlock, answer_queries
from evernear.evaluation.recognizer import Recognizer
from evernear.index.search import Classifications, Neighbors

KIND = "evaluate"
Columns = dict[str, NDArray[Any]]
RunParts = Callable[[Parts, OpenWorker, Mapping[str, Path]], None]
"""Runs all parts. The last argument is the result of `inputs_of`."""


class EvaluatePart(Part):
    """Whole shards of the test split. A unit is a query."""

    first: int
    """Position of the first query in the split."""
    shards: tuple[str, ...]


class Shared(Frozen):
    dataset: str
    digest: str
    network_sha256: str
    index_digest: str
    released: dict[str, str]
    """Versions of ``champion`` and ``anchor``, if they are measured."""
    batch_size: int
    part_size_bytes: int


class PartAnswers(Frozen):
    file: str
    sha256: str


def systems_to_measure(
    dataset: Dataset,
    candidate: Recognizer,
    champion: ReleasedSystem | None,
    anchor: ReleasedSystem | UnavailableSystem | None,
) -> dict[str, Recognizer]:
    """The recognizers that answer the test split, by their names in `SYSTEMS`.

    Raises:
        DataError: the candidate or the champion takes images of a different shape.
    """
    systems = {"candidate": candidate}
    if champion:
        systems["champion"] = champion.recognizer
    for recognizer in systems.values():
        dataset.require_shape(recognizer.shape, recognizer.name or "The candidate")
    if champion and isinstance(anchor, ReleasedSystem) and anchor.recognizer.shape == dataset.shape:
        systems["anchor"] = anchor.recognizer
    return systems


def plan_answers(
    dataset: Dataset,
    systems: Mapping[str, Recognizer],
    results: Store,
    folder: str,
    batch_size: int,
    part_size_bytes: int,
) -> Parts:
    """Plan the parts in ``folder`` of ``results``, or return those that an earlier call planned for
    the same answers."""
    candidate = systems["candidate"]
    shared = Shared(
        dataset=dataset.manifest.name,
        digest=dataset.digest,
        network_sha256=candidate.network_sha256,
        index_digest=candidate.gallery.description.digest,
        released={name: systems[name].name for name in SYSTEMS[1:] if name in systems},
        batch_size=batch_size,
        part_size_bytes=part_size_bytes,
    )
    folder = f"{folder}/{KIND}-{sha256_bytes(shared.to_json())[:16]}"
    planned = _parts(dataset, part_size_bytes)
    return Parts.find(results, folder) or Parts.make(results, folder, KIND, shared.model_dump(mode="json"), planned)


def _parts(dataset: Dataset, size_bytes: int) -> Iterator[EvaluatePart]:
    image_bytes, first, count, group = int(np.prod(dataset.shape)), 0, 0, list[str]()
    for shard in dataset.shards("test"):
        if group and image_bytes * (count + shard.count) > size_bytes:
            yield EvaluatePart(units=count, first=first, shards=tuple(group))
            first, count, group = first + count, 0, []
        count += shard.count
        group.append(shard.sha256)
    if group:
        yield EvaluatePart(units=count, first=first, shards=tuple(group))


def candidate_folder(parts: Parts, artifact: Literal["network", "index"]) -> str:
    """The folder from which workers on other machines fetch an artifact of the candidate."""
    return f"{parts.folder}/candidate/{artifact}"


def inputs_of(parts: Parts, network_dir: Path, index_dir: Path) -> dict[str, Path]:
    """The directories that workers on other machines need, by folder in the store."""
    return {candidate_folder(parts, "network"): network_dir, candidate_folder(parts, "index"): index_dir}


@contextmanager
def run_answers(
    parts: Parts,
    systems: Mapping[str, Recognizer],
    dataset: Dataset,
    network_dir: Path,
    index_dir: Path,
    run: RunParts,
) -> Generator[Answered]:
    """Run the planned ``parts`` with ``run``, and yield the stored answers. The candidate's
    artifacts are in ``network_dir`` and ``index_dir``."""
    run(parts, partial(open_here, systems, dataset), inputs_of(parts, network_dir, index_dir))
    with stored_answers(parts) as answered:
        yield answered


def open_here(systems: Mapping[str, Recognizer], dataset: Dataset, parts: Parts) -> Worker:
    """An `OpenWorker` once all arguments except ``parts`` are bound."""
    return partial(_answer_part, systems, dataset, parts)


def _answer_part(systems: Mapping[str, Recognizer], dataset: Dataset, parts: Parts, number: int, value: bytes) -> bytes:
    part = EvaluatePart.from_json(value, f"part {number} in {parts.store.uri}")
    batch_size = Shared.model_validate(parts.plan.shared).batch_size
    by_hash = {shard.sha256: shard for shard in dataset.manifest.shards}
    shards = [by_hash[sha256] for sha256 in part.shards]
    columns: Columns = {}
    for name, recognizer in systems.items():
        blocks = answer_queries(recognizer, dataset, shards, batch_size)
        if name == "candidate":
            columns |= _with_shown_queries(blocks, dataset, part.first)
        else:
            columns |= _joined(map(_answer_columns, blocks), name)
    with tempfile.TemporaryDirectory(prefix="evernear-answers-") as scratch:
        path = Path(scratch) / "answers.npz"
        with disk_errors(path):
            np.savez(path, **columns)  # pyright: ignore[reportArgumentType] - allow_pickle is not a column
        sha256 = sha256_file(path)
        file = f"{parts.folder}/{sha256}.npz"
        parts.store.put(file, path)
    return PartAnswers(file=file, sha256=sha256).to_json()


def _answer_columns(answered: AnsweredBlock) -> Columns:
    """One row for each query of a block."""
    answers = answered.answers
    return {
        "labels": answers.labels,
        "distances": answers.distances,
        "unknown": answers.unknown,
        "neighbors": answered.neighbors.labels[:, :RECALL_AT],
    }


def _joined(blocks: Iterable[Columns], name: str) -> Columns:
    rows = list(blocks)
    return {f"{name}/{column}": np.concatenate([row[column] for row in rows]) for column in rows[0]}


def _with_shown_queries(blocks: Iterable[AnsweredBlock], dataset: Dataset, first: int) -> Columns:
    """The candidate's columns, and the labels and digests of the queries. Those that the run page
    may show also have their images, embeddings and neighbors."""
    answers: list[Columns] = []
    queries: list[Columns] = []
    shown: list[Columns] = []
    count = 0
    for each in blocks:
        block = each.block
        answers.append(_answer_columns(each))
        queries.append({"labels": block.labels, "digests": block.digests})
        rows = queries_to_show(dataset, first + count, block.labels, each.answers)
        shown.append(
            {
                "row": rows + count,
                "images": block.images[rows],
                "embeddings": each.embeddings[rows],
                "neighbor_rows": each.neighbors.rows[rows, :NEIGHBORS],
                "neighbor_distances": each.neighbors.distances[rows, :NEIGHBORS],
            }
        )
        count += len(block)
    columns = _joined(answers, "candidate") | _joined(queries, "query")
    # the clearest mistakes of the part are among those of its blocks
    rows = queries_to_show(dataset, first, columns["query/labels"], _answers(columns, "candidate"))
    joined = _joined(shown, "shown")
    selected = np.isin(joined["shown/row"], rows)
    return columns | {name: column[selected] for name, column in joined.items()}


def _answers(columns: Mapping[str, NDArray[Any]], name: str) -> Classifications:
    return Classifications(*(columns[f"{name}/{column}"] for column in ("labels", "distances", "unknown")))


class _ShownRows:
    """The rows of an array that an `ExampleCollector` reads, by row number."""

    def __init__(self, numbers: NDArray[np.int64], values: NDArray[Any]) -> None:
        self._positions = {number: position for position, number in enumerate(numbers.tolist())}
        self._values = values

    def __getitem__(self, key: Any) -> Any:
        row, *rest = key if isinstance(key, tuple) else (key,)
        return self._values[(self._positions[int(row)], *rest)]


@contextmanager
def stored_answers(parts: Parts) -> Generator[Answered]:
    """The answers of each system in the order of the split, one part at a time. Only the queries of
    `queries_to_show` have images, embeddings, and rows and distances of neighbors."""
    where = f"a result in {parts.store.uri}"
    with tempfile.TemporaryDirectory(prefix="evernear-answers-") as scratch:
        files: list[Path] = []
        for result in parts.results():
            stored = PartAnswers.from_json(result.value, where)
            files.append(parts.store.fetch(stored.file, Path(scratch) / f"{stored.sha256}.npz", stored.sha256))

        def answered(name: str) -> Iterator[AnsweredBlock]:
            for path in files:
                with np.load(path, allow_pickle=False) as columns:
                    yield _stored_block(columns, name)

        yield answered


def _stored_block(columns: Mapping[str, NDArray[Any]], name: str) -> AnsweredBlock:
    numbers = columns["shown/row"]

    def shown(column: str) -> Any:
        return _ShownRows(numbers, columns[f"shown/{column}"])

    return AnsweredBlock(
        Block(shown("images"), columns["query/labels"], columns["query/digests"]),
        shown("embeddings"),
        Neighbors(columns[f"{name}/neighbors"], shown("neighbor_distances"), shown("neighbor_rows")),
        _answers(columns, name),
    )
