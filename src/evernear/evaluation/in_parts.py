"""The answers of candidate, champion and anchor to the test split, in parts
(`evernear.common.parts`).

A part is a range of whole shards. Its result is an object with one row for each query and system,
because the paired test needs each query rather than a sum. `stored_answers` reads the rows in the
order of the split, and `evernear.evaluation.evaluate` measures the same figures as without parts.

::

    <folder>/evaluate-<identity>/...              the plan, its parts and their results
    <folder>/evaluate-<identity>/<sha256>.npz     the answers of one part
    <folder>/evaluate-<identity>/candidate/...    network and index, if other machines run parts
"""

import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from evernear.common.disk import disk_errors, sha256_bytes, sha256_file
from evernear.common.frozen import Frozen
from evernear.common.parts import OpenWorker, Part, Parts, Worker
from evernear.common.store import Store
from evernear.data.manifest import Shard
from evernear.data.shards import Dataset
from evernear.evaluation.evaluate import SYSTEMS, Answered, ReleasedSystem, UnavailableSystem
from evernear.evaluation.measure import RECALL_AT, AnsweredBlock, answer_queries
from evernear.evaluation.recognizer import Recognizer
from evernear.index.search import Classifications, Neighbors

KIND = "evaluate"
COLUMNS = 6
"""Number of arrays in `Neighbors` and `Classifications`."""
RunParts = Callable[[Parts, OpenWorker, Mapping[str, Path]], None]
"""Runs all parts. The last argument is the result of `inputs_of`."""


class EvaluatePart(Part):
    """Whole shards of the test split. A unit is a query."""

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
    image_bytes, count, group = int(np.prod(dataset.shape)), 0, list[str]()
    for shard in dataset.shards("test"):
        if group and image_bytes * (count + shard.count) > size_bytes:
            yield EvaluatePart(units=count, shards=tuple(group))
            count, group = 0, []
        count += shard.count
        group.append(shard.sha256)
    if group:
        yield EvaluatePart(units=count, shards=tuple(group))


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
    with stored_answers(parts, dataset) as answered:
        yield answered


def open_here(systems: Mapping[str, Recognizer], dataset: Dataset, parts: Parts) -> Worker:
    """An `OpenWorker` once all arguments except ``parts`` are bound."""
    return partial(_answer_part, systems, dataset, parts)


def _answer_part(systems: Mapping[str, Recognizer], dataset: Dataset, parts: Parts, number: int, value: bytes) -> bytes:
    part = EvaluatePart.from_json(value, f"part {number} in {parts.store.uri}")
    shards, columns = _shards(part, dataset), dict[str, NDArray[Any]]()
    for name, recognizer in systems.items():
        blocks = answer_queries(recognizer, dataset, shards, _batch_size(parts))
        for column, rows in enumerate(zip(*map(_answer_columns, blocks), strict=True)):
            columns[f"{name}/{column}"] = np.concatenate(rows)
    with tempfile.TemporaryDirectory(prefix="evernear-answers-") as scratch:
        path = Path(scratch) / "answers.npz"
        with disk_errors(path):
            np.savez(path, **columns)  # pyright: ignore[reportArgumentType] - allow_pickle is not a column
        sha256 = sha256_file(path)
        file = f"{parts.folder}/{sha256}.npz"
        parts.store.put(file, path)
    return PartAnswers(file=file, sha256=sha256).to_json()


def _answer_columns(answered: AnsweredBlock) -> tuple[NDArray[Any], ...]:
    """One row for each query of a block: the fields of `Neighbors`, then of `Classifications`."""
    near, answers = answered.neighbors, answered.answers
    neighbors = (column[:, :RECALL_AT] for column in (near.labels, near.distances, near.rows))
    return *neighbors, answers.labels, answers.distances, answers.unknown


@contextmanager
def stored_answers(parts: Parts, dataset: Dataset) -> Generator[Answered]:
    """The answers of each system in the order of the split, with the images of ``dataset``."""
    where = f"a result in {parts.store.uri}"
    with tempfile.TemporaryDirectory(prefix="evernear-answers-") as scratch:
        files: list[tuple[EvaluatePart, Path]] = []
        for number, result in enumerate(parts.results()):
            part = EvaluatePart.from_json(parts.part(number), f"part {number} in {parts.store.uri}")
            stored = PartAnswers.from_json(result.value, where)
            path = parts.store.fetch(stored.file, Path(scratch) / f"{stored.sha256}.npz", stored.sha256)
            files.append((part, path))

        def answered(name: str) -> Iterator[AnsweredBlock]:
            for part, path in files:
                with np.load(path, allow_pickle=False) as stored:
                    columns = [stored[f"{name}/{column}"] for column in range(COLUMNS)]
                first = 0
                for block in chain.from_iterable(
                    dataset.shard_blocks(shard, _batch_size(parts)) for shard in _shards(part, dataset)
                ):
                    rows = [column[first : first + len(block)] for column in columns]
                    yield AnsweredBlock(block, None, Neighbors(*rows[:3]), Classifications(*rows[3:]))
                    first += len(block)

        yield answered


def _shards(part: EvaluatePart, dataset: Dataset) -> list[Shard]:
    by_hash = {shard.sha256: shard for shard in dataset.manifest.shards}
    return [by_hash[sha256] for sha256 in part.shards]


def _batch_size(parts: Parts) -> int:
    return Shared.model_validate(parts.plan.shared).batch_size
