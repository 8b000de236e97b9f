"""Remove from a store all traces of images that the source no longer has.

An image is *removed* if a stored snapshot of a dataset contains the image and the dataset's newest
snapshot does not. A snapshot is *affected* if it contains a removed image. A release is affected if
it was built from an affected snapshot or if its network was trained on an affected snapshot. `find`
only reads. `forget_images` deletes:

- affected releases, with their archives and Milvus collections
- affected snapshots, the shards that no other snapshot has, and the table rows of removed images
- cached embeddings of removed images, all training checkpoints, and all step parts with their
  results
- sample images, run pages and the list of suspect labels, if they show an affected snapshot
- logged queries and submitted images that may show a class of a removed image

The champion is never deleted. `forget_images` refuses to run while the champion is affected. If the
gate's anchor is deleted, the champion becomes the anchor. Shards and snapshots are deleted last, so
that a repeated call after a kill still finds the removed images.
"""

import base64
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from evernear.common.disk import sha256_bytes
from evernear.common.frozen import Frozen
from evernear.common.lease import Lease, StoreRecord
from evernear.common.parts import PARTS
from evernear.common.run_record import RUNS, RunRecord
from evernear.common.step_results import CHECKPOINTS
from evernear.common.store import Store
from evernear.data.manifest import Manifest, Shard, manifest_key
from evernear.data.repair import stored_digests
from evernear.data.shards import Dataset, remove_cached
from evernear.data.snapshots import DATASETS, Snapshots, parts_prefix
from evernear.data.writer import shard_key
from evernear.embedding.embeddings import EMBEDDINGS_PREFIX, cached_digests, digest_strings
from evernear.errors import ConflictError, IntegrityError
from evernear.evaluation.answer_table import ANSWERS_FILE
from evernear.maintenance.kinds import require_all_current
from evernear.release.pruning import remove_releases
from evernear.release.registry import Registry
from evernear.review.answers import ANSWERS, labels_given
from evernear.review.queue import ORIGINALS, SUBMITTED, Submission
from evernear.review.suspects import SUSPECTS, Suspects
from evernear.serving.query_log_files import QUERIES, LoggedQuery, closed_at, parse_file

PAGES = (ANSWERS_FILE, "examples.json", "near_duplicates.json", "replay.json", "run.html")
Digests = NDArray[np.bytes_]


class Forgotten(Frozen):
    """The objects that `forget_images` deletes or has deleted."""

    images: int
    """Number of distinct removed images in stored shards."""
    labels: tuple[str, ...]
    releases: tuple[str, ...]
    champion: str | None
    """The champion, if it is affected. Then nothing can be deleted."""
    anchor: str | None
    """The anchor, if it is deleted. The champion replaces it."""
    snapshots: tuple[str, ...]
    """Affected snapshots, as ``<dataset>/<digest>``."""
    shards: int
    embeddings: int
    checkpoints: int
    parts: int
    """Number of objects in step parts, such as the embeddings of a run."""
    pages: int
    queries: int
    submissions: int
    unreadable: tuple[str, ...] = ()
    """Damaged records, query logs, answers and submissions with unknown contents."""


@dataclass(frozen=True)
class _DatasetState:
    snapshots: Snapshots
    current: Digests
    """The sorted image digests of the newest snapshot."""
    clean: list[Manifest]
    """Snapshots without a removed image, including the newest snapshot."""
    affected: list[Manifest]
    shards: set[str]
    """The sha256 of each stored shard that only affected snapshots contain."""
    removed: dict[bytes, str]
    """The class of each removed image, keyed by the image's digest."""


def find(store: Store) -> Forgotten:
    require_all_current(store)
    return _Forgetting(store).forgotten


def forget_images(store: Store) -> Forgotten:
    """Delete removed images and all objects made from them. If the process is killed, call the
    function again.

    No ingest may run during the call.

    Raises:
        BusyError: a prune or a repair is in progress.
        ConflictError: the champion is affected, or the champion or a dataset changed during the
            call. Repeat the call.
        FormatError: another version of evernear wrote the store. Nothing was changed.
        StoreError: the store or Milvus fails. Repeat the call.
        IntegrityError: an object in the store is damaged.
    """
    require_all_current(store)
    with Lease(StoreRecord(store, "`evernear forget`")):
        forgetting = _Forgetting(store)
        if forgetting.forgotten.champion is not None:
            raise ConflictError(
                f"The champion {forgetting.forgotten.champion} was built from images that the source no longer has, or "
                "its network was trained on them. Train and promote a release without them first; nothing was deleted."
            )
        forgetting.delete()
        return forgetting.forgotten


class _Forgetting:
    def __init__(self, store: Store) -> None:
        self._store, self._registry = store, Registry(store)
        self._records, faults = self._registry.records(include_pruned=True)
        self._unreadable = [*faults]
        names = sorted({info.key.split("/")[1] for info in store.list(DATASETS) if info.key.endswith("/head.json")})
        self._datasets = [_state(store, name) for name in names]
        self._labels = {label for dataset in self._datasets for label in dataset.removed.values()}
        self._releases = self._affected_releases()
        self._embeddings = list(self._stale_embeddings())
        has_affected = any(dataset.affected or dataset.shards for dataset in self._datasets)
        self._checkpoints = [info.key for info in store.list(CHECKPOINTS)] if has_affected else []
        parts = (PARTS, *map(parts_prefix, names)) if has_affected else ()
        self._parts = [info.key for prefix in parts for info in store.list(prefix)]
        self._pages = list(self._stale_pages())
        self._given = self._labels_given()
        self._queries = dict(self._affected_queries())
        self._submissions = list(self._affected_submissions())
        self._originals = list(self._affected_originals())
        champion = self._registry.champion()
        self.forgotten = Forgotten(
            images=sum(len(dataset.removed) for dataset in self._datasets),
            labels=tuple(sorted(self._labels)),
            releases=tuple(self._releases),
            champion=champion.version if champion and champion.version in self._releases else None,
            anchor=champion.anchor if champion and champion.anchor in self._releases else None,
            snapshots=tuple(f"{d.snapshots.name}/{manifest.digest}" for d in self._datasets for manifest in d.affected),
            shards=sum(len(dataset.shards) for dataset in self._datasets),
            embeddings=len(self._embeddings),
            checkpoints=len(self._checkpoints),
            parts=len(self._parts),
            pages=len(self._pages),
            queries=sum(dropped for _, dropped in self._queries.values()),
            submissions=len(self._submissions),
            unreadable=tuple(self._unreadable),
        )

    def delete(self) -> None:
        remove_releases(self._registry, self._releases)
        for key in (
            *self._embeddings,
            *self._checkpoints,
            *self._parts,
            *self._pages,
            *self._originals,
            *self._submissions,
        ):
            self._store.delete(key)
        for key, (data, _) in self._queries.items():
            self._store.put(key, data)
        for dataset in self._datasets:
            if dataset.affected or dataset.shards:
                self._delete_images(dataset)

    def _delete_images(self, dataset: _DatasetState) -> None:
        name = dataset.snapshots.name
        # An ingest in progress would name shards that are deleted here. One of the two
        # `interrupt_ingests` calls makes such an ingest fail.
        dataset.snapshots.interrupt_ingests()
        dataset.snapshots.compact_tables(dataset.clean)
        for sha256 in sorted(dataset.shards):
            self._store.delete(shard_key(name, sha256))
            remove_cached(sha256)
        for manifest in dataset.affected:
            self._store.delete(manifest_key(name, manifest.digest))
        dataset.snapshots.interrupt_ingests()

    def _affected_releases(self) -> list[str]:
        """Releases built from an affected snapshot, or whose network was trained on one. A reindex
        copies the network's description, so the oldest release with it names the training
        snapshot."""
        clean = {manifest.digest for dataset in self._datasets for manifest in dataset.clean}
        published = set(self._registry.list())
        trained_on: dict[str, str] = {}
        affected: list[str] = []
        for version, record in self._records.items():
            manifest = record.manifest
            trained = trained_on.setdefault(manifest.network_description_sha256, manifest.dataset_digest)
            snapshots = {manifest.dataset_digest, trained}
            if version in published and not snapshots <= clean:
                affected.append(version)
        return affected

    def _stale_embeddings(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="evernear-forget-") as scratch:
            for info in self._store.list(EMBEDDINGS_PREFIX):
                try:
                    digests = cached_digests(self._store.fetch(info.key, Path(scratch) / "cached.npy"), info.key)
                except IntegrityError:  # only a cached object
                    yield info.key
                    continue
                if not np.any([_contains(dataset.current, digests) for dataset in self._datasets], axis=0).all():
                    yield info.key

    def _stale_pages(self) -> Iterator[str]:
        """Run pages and samples, unless their snapshots are known to be clean."""
        clean = {manifest.digest for dataset in self._datasets for manifest in dataset.clean}
        snapshots = cache(self._snapshots_of)
        for info in self._store.list(RUNS):
            run, _, name = info.key.removeprefix(RUNS).partition("/")
            if name in PAGES and not snapshots(run) <= clean:
                yield info.key
        suspects = self._store.find(SUSPECTS)
        with suppress(IntegrityError):
            if suspects is None or Suspects.from_json(suspects[0], SUSPECTS).dataset_digest in clean:
                return
        yield SUSPECTS

    def _snapshots_of(self, run: str) -> set[str]:
        """The snapshots whose images the pages of a run may show: none if the run failed before
        it validated one, and an unknown one if its record is damaged."""
        record = RunRecord(self._store, run)
        with suppress(IntegrityError):
            documents = record.load("validation"), record.load("evaluation").get("candidate", {})
            return {document["dataset_digest"] for document in documents if document}
        return {""}

    def _affected_queries(self) -> Iterator[tuple[str, tuple[bytes, int]]]:
        for info in self._store.list(QUERIES) if self._labels else ():
            if closed_at(info.key) is None:
                continue
            try:
                period, queries = parse_file(self._store.get(info.key), info.key)
            except IntegrityError:
                self._unreadable.append(info.key)
                continue
            remaining = [query for query in queries if not self._may_show(query)]
            if len(remaining) < len(queries):
                lines = "".join(f"{line.model_dump_json()}\n" for line in (period, *remaining))
                yield info.key, (lines.encode(), len(queries) - len(remaining))

    def _affected_submissions(self) -> Iterator[str]:
        for info in self._store.list(SUBMITTED) if self._labels else ():
            try:
                submission = Submission.from_json(self._store.get(info.key), info.key)
            except IntegrityError:
                self._unreadable.append(info.key)
                continue
            given = self._given.get(PurePosixPath(info.key).stem, ())
            if not self._labels.isdisjoint((*submission.candidates, *given)):
                yield info.key

    def _affected_originals(self) -> Iterator[str]:
        """Files of affected submissions, and orphans of a killed process."""
        affected = {PurePosixPath(key).stem for key in self._submissions}
        others = {PurePosixPath(info.key).stem for info in self._store.list(SUBMITTED)} - affected
        for info in self._store.list(ORIGINALS) if self._labels else ():
            if PurePosixPath(info.key).name not in others:
                yield info.key

    def _may_show(self, query: LoggedQuery) -> bool:
        if not query.image and not query.file:
            return False
        given = [label for file in (query.image, query.file) for label in self._given.get(_sha256(file), ())]
        return not self._labels.isdisjoint((query.pred, *query.candidates, *given))

    def _labels_given(self) -> dict[str, frozenset[str]]:
        """Unlike a prediction, a label can name a class that no release has."""
        try:
            return labels_given(self._store) if self._labels else {}
        except IntegrityError:
            self._unreadable.append(ANSWERS)
            return {}


def _sha256(encoded: str) -> str:
    """The hash of a base64-encoded image, or an empty string if the image is missing or damaged."""
    try:
        return sha256_bytes(base64.b64decode(encoded, validate=True)) if encoded else ""
    except ValueError:
        return ""


def _state(store: Store, name: str) -> _DatasetState:
    snapshots = Snapshots(store, name)
    head = snapshots.head()
    if head is None:
        raise IntegrityError(f"The dataset {name} in {store.uri} has no snapshot; run the ingest step again.")
    current = np.sort(np.fromiter(stored_digests(snapshots, head), "S32"))
    folder = f"{DATASETS}{name}/"
    stored = {PurePosixPath(info.key).stem for info in store.list(f"{folder}shards/")}
    keys = [info.key for info in store.list(f"{folder}manifests/")]
    manifests = [Manifest.from_store(store.get(key), store, key) for key in keys]
    removed: dict[bytes, str] = {}
    clean_shards = {shard.sha256 for shard in head.shards}
    affected_shards: set[str] = set()
    for manifest in manifests:
        dataset = Dataset(manifest, store)
        for shard in manifest.shards:
            if shard.sha256 in clean_shards | affected_shards:
                continue
            # A shard may be missing because an earlier call was killed.
            of_shard = _removed(dataset, shard, current) if shard.sha256 in stored else None
            (clean_shards if of_shard == {} else affected_shards).add(shard.sha256)
            removed |= of_shard or {}
    affected = [m for m in manifests if any(shard.sha256 in affected_shards for shard in m.shards)]
    clean = [manifest for manifest in manifests if manifest not in affected]
    used = {shard.sha256 for manifest in clean for shard in manifest.shards}
    return _DatasetState(snapshots, current, clean, affected, stored - used, removed)


def _removed(dataset: Dataset, shard: Shard, current: Digests) -> dict[bytes, str]:
    removed: dict[bytes, str] = {}
    for block in dataset.shard_blocks(shard):
        for row in np.flatnonzero(~_contains(current, digest_strings(block.digests))):
            removed[block.digests[row].tobytes()] = dataset.labels[block.labels[row]]
    return removed


def _contains(current: Digests, digests: Digests) -> NDArray[np.bool_]:
    """Whether ``current``, sorted and not empty, contains each of ``digests`` (N,)."""
    positions = np.minimum(np.searchsorted(current, digests), len(current) - 1)
    return current[positions] == digests
