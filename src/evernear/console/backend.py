"""The backend of the pages: what they read and change."""

import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from typing import NamedTuple
from uuid import uuid4

from starlette.exceptions import HTTPException
from starlette.requests import Request

from evernear.common import audit
from evernear.common.audit import AuditEvent
from evernear.common.store import Store
from evernear.common.text import class_name
from evernear.console.access import User, require
from evernear.console.runs import Done, Runner
from evernear.data.list import dataset_name
from evernear.data.manifest import Manifest
from evernear.data.shards import Dataset
from evernear.data.snapshots import Snapshots
from evernear.data.sources import open_source
from evernear.errors import (
    DataError,
    EvernearError,
    IntegrityError,
    MissingObjectError,
    ServingError,
    SettingsError,
    StoreError,
)
from evernear.evaluation.answer_table import ANSWERS_FILE, AnswerTable, Kind
from evernear.release.manifest import ReleaseManifest
from evernear.release.promotions import Champion, Promotion
from evernear.release.records import Record
from evernear.release.registry import Registry
from evernear.reporting.run_report import find_run
from evernear.review.answers import Answer, Answers, ReleasedAnswers, images_by_class, waiting_classes
from evernear.review.label_target import open_label_target
from evernear.review.live_labels import RandomQueries
from evernear.review.queue import Item, Queue, Submissions, read_all
from evernear.review.renames import finish_renames, load_renames, new_names
from evernear.review.suspects import Suspect, load_suspects
from evernear.serving.gallery_images import GalleryImages
from evernear.settings import Settings
from evernear.settings.triggers import Right

QUEUE_ITEMS = 240
PAGE_RELEASES = 25
"""Maximum number of releases on a page, and maximum number of promotions on a page."""
_RECORDS = 64
_SNAPSHOTS = 4
_PROMOTIONS = 10_000


class Backend:
    """The objects that the pages read and change. If the source is not writable, ``answers`` is
    None and ``fault`` is the reason."""

    def __init__(self, settings: Settings, store: Store, runner: Runner) -> None:
        self.settings = settings
        self.store = store
        self.runner = runner
        self.releases = Releases(store)
        self.queue = Queue(store)
        self.random_queries = RandomQueries(store)
        self.submissions = Submissions(store)
        self.gallery = GalleryImages(store)
        self.released = ReleasedAnswers(store)
        self.dataset = lru_cache(_SNAPSHOTS)(self._open_dataset)
        self.answers_of = lru_cache(_SNAPSHOTS)(self._read_answers)
        self.lock = threading.Lock()  # serializes changes to the source
        self.answers: Answers | None = None
        self.fault = ""
        try:
            target = open_label_target(settings.data.source, settings.data)
        except EvernearError as error:
            self.fault = str(error)
        else:
            self.answers = Answers(store, target)
            self.answers.recover()
            finish_renames(store, target)

    def require_answers(self) -> Answers:
        if self.answers is None:
            raise SettingsError(self.fault)
        return self.answers

    def latest(self) -> dict[str, Answer]:
        return self.answers.latest() if self.answers else {}

    def live(self) -> ReleaseManifest | None:
        champion = self.releases.champion()
        record = self.releases.find(champion.version) if champion else None
        return record.manifest if record else None

    def classes(self, latest: Mapping[str, Answer]) -> list[str]:
        """The classes that users may name: classes of the source itself, followed by the other
        classes of the ``latest`` answers."""
        own = self.answers.target.labels if self.answers else []
        return list(dict.fromkeys([*own, *sorted(images_by_class(latest.values()))]))

    def waiting(self, latest: Mapping[str, Answer], live: ReleaseManifest | None) -> dict[str, int]:
        """The number of images of each class that waits for more images from review."""
        own = self.answers.target.labels if self.answers else []
        used = {*own, *map(class_name, live.labels if live else ())}
        return waiting_classes(latest.values(), used, self.settings.validation.min_class_images)

    def pending(self, answered: Collection[str]) -> list[Item]:
        """Images to review: user submissions, followed by logged queries. Each kind is sorted
        newest first."""
        sent = self.submissions.pending(answered, QUEUE_ITEMS)
        known = {*answered, *(item.id for item in sent)}
        return [*sent, *self.queue.pending(known, QUEUE_ITEMS - len(sent))]

    def find(self, image: str) -> Item | None:
        return self.submissions.find(image) or self.queue.find(image)

    def original(self, image: str) -> bytes:
        """The image file under review: the submitted file or, for a logged query, the network's
        input."""
        sent = self.submissions.original(image)
        item = None if sent else self.queue.find(image)
        if sent is None and item is None:
            raise ServingError("The image is no longer in the queue: it was too old, or deleted.")
        return sent or (item.image if item else b"")

    def perform(
        self, request: Request, right: Right, what: str, act: Callable[[User], Done], release: str = ""
    ) -> Done:
        """Call ``act`` if the user who made ``request`` has the permission ``right``, and record
        the result in the audit log."""
        user: User = request.state.user

        def record(result: audit.Result, **details: str) -> None:
            event = AuditEvent(
                request=f"console-{uuid4().hex[:16]}",
                at=self.now(),
                who=user.name,
                what=what,
                result=result,
                where="console",
                release=release,
            )
            audit.write(self.store, event.model_copy(update=details))

        try:
            require(request, right)
            done = act(user)
        except (HTTPException, EvernearError) as error:
            is_refused = isinstance(error, HTTPException)
            with suppress(StoreError):  # the failure itself is displayed
                record("refused" if is_refused else "failed", detail=error.detail if is_refused else str(error))
            raise
        record("done", run=done.run)
        return done

    def snapshot(self) -> Manifest | None:
        """The newest snapshot of the source. A console in a cluster may have no access to the
        source, and shows the newest snapshot of the live release's dataset."""
        try:
            name = dataset_name(self.settings.data, open_source(self.settings.data.source))
        except EvernearError:
            name = ""
        manifest = Snapshots(self.store, name).head() if name else None
        if manifest is not None:
            return manifest
        trained = self.live()
        return Snapshots(self.store, trained.dataset_name).head() if trained else None

    def renamed(self) -> dict[str, str]:
        """The new names of the classes that were renamed since the newest snapshot."""
        manifest = self.snapshot()
        if manifest is None:
            return {}
        ingested = datetime.fromisoformat(manifest.created)
        return new_names(each for each in load_renames(self.store)[0] if each.at > ingested)

    def live_answers(self) -> "ReleaseAnswers | None":
        """The live release's answers to its test images, or None if no run recorded them."""
        live = self.live()
        return self.answers_of(live.version) if live else None

    def _read_answers(self, version: str) -> "ReleaseAnswers | None":
        manifest = self.releases.record(version).manifest
        try:
            run = find_run(self.store, version)
        except StoreError:
            return None
        data = run.get(ANSWERS_FILE)
        return ReleaseAnswers(manifest, AnswerTable(data, f"{self.store.uri}/{run.run}")) if data else None

    def _open_dataset(self, name: str, digest: str) -> Dataset:
        dataset = Dataset.find(self.store, name, digest)
        if dataset is None:
            raise DataError("The store no longer has this snapshot; reload the page.")
        return dataset

    def suspects(self) -> tuple[Suspect, ...]:
        return load_suspects(self.store, self.settings.data.source)

    @staticmethod
    def now() -> datetime:
        return datetime.now(UTC)


def is_digest(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{64}", text) is not None


class ReleaseAnswers(NamedTuple):
    """A release, and its answers to the test images of its snapshot."""

    release: ReleaseManifest
    table: AnswerTable

    def numbers(self, kind: Kind) -> list[int]:
        return self.table.of(kind, self.release.threshold)

    def digest(self, number: int) -> str:
        return self.table.rows["digest"][number].as_py().hex()

    def labels(self, digests: Iterable[str]) -> dict[str, str]:
        """The label of each of ``digests`` that is a test image."""
        wanted = {bytes.fromhex(digest) for digest in digests if is_digest(digest)}
        rows = self.table.rows
        labels = zip(rows["digest"].to_pylist(), rows["label"].to_pylist(), strict=True)
        return {digest.hex(): label for digest, label in labels if digest in wanted}

    def digests(self, kind: Kind) -> set[str]:
        return {self.digest(number) for number in self.numbers(kind)}


class Releases:
    """The releases of one store. Every method may raise `StoreError`."""

    def __init__(self, store: Store) -> None:
        self._registry = Registry(store)
        self.champion = self._registry.champion
        self.record = lru_cache(_RECORDS)(self._record)
        self._promotion = lru_cache(_PROMOTIONS)(self._registry.pointer.find_in_history)

    def newest(self) -> tuple[list[Record], list[str]]:
        """The most recent releases, newest first, and an error message for each damaged release
        record."""
        versions = islice(reversed([*self._registry.list()]), PAGE_RELEASES)
        found = list(read_all(self._record_or_fault, list(versions)))
        return [each for each in found if isinstance(each, Record)], [each for each in found if isinstance(each, str)]

    def history(self, champion: Champion, since: datetime) -> list[Promotion]:
        """The readable promotions and rollbacks since ``since``, newest first, and at least a page
        of them."""
        found = [champion.promotion]
        numbers = range(champion.promotion.number - 1, 0, -1)
        for first in range(0, len(numbers), PAGE_RELEASES):
            earlier = read_all(self._promotion, numbers[first : first + PAGE_RELEASES])
            found += [promotion for promotion in earlier if promotion is not None]
            if found[-1].since < since:
                break
        return found

    def rollback_target(self, champion: Champion | None) -> str:
        """The release that a rollback restores. Empty if there is none or it was pruned."""
        previous = champion.previous if champion else None
        return previous if previous and self._registry.is_published(previous) else ""

    def find(self, version: str) -> Record | None:
        """The record of a release or pruned release, or None if the store has no such record."""
        try:
            return self.record(version)
        except MissingObjectError:
            return None

    def _record(self, version: str) -> Record:
        record = self._registry.find(version)
        if record is None:  # an exception is not cached
            raise MissingObjectError(f"Release {version} does not exist in {self._registry.uri}.")
        return record

    def _record_or_fault(self, version: str) -> Record | str:
        try:
            return self.record(version)
        except IntegrityError as error:
            return str(error)
