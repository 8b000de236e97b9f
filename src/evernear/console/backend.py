"""The backend of the pages: what they read and change."""

import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from uuid import uuid4

from starlette.exceptions import HTTPException
from starlette.requests import Request

from evernear.common import audit
from evernear.common.audit import AuditEvent
from evernear.common.store import Store
from evernear.common.text import class_name
from evernear.console.access import User, require
from evernear.console.runs import Done, Runner
from evernear.errors import EvernearError, IntegrityError, MissingObjectError, ServingError, SettingsError, StoreError
from evernear.release.manifest import ReleaseManifest
from evernear.release.promotions import Champion, Promotion
from evernear.release.records import Record
from evernear.release.registry import Registry
from evernear.review.answers import Answer, Answers, ReleasedAnswers, images_by_class, waiting_classes
from evernear.review.label_target import open_label_target
from evernear.review.live_labels import RandomQueries
from evernear.review.queue import Item, Queue, Submissions, read_all
from evernear.review.suspects import Suspect, load_suspects
from evernear.serving.gallery_images import GalleryImages
from evernear.settings import Settings
from evernear.settings.triggers import Right

QUEUE_ITEMS = 240
PAGE_RELEASES = 25
"""Maximum number of releases on a page, and maximum number of promotions on a page."""
_RECORDS = 64
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

    def suspects(self) -> tuple[Suspect, ...]:
        return load_suspects(self.store, self.settings.data.source)

    @staticmethod
    def now() -> datetime:
        return datetime.now(UTC)


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
