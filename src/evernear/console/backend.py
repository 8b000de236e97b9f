"""The backend of the pages: what they read and change."""

import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import uuid4

from starlette.exceptions import HTTPException
from starlette.requests import Request

from evernear.common import audit
from evernear.common.audit import AuditEvent
from evernear.common.store import Store
from evernear.console.access import User, require
from evernear.console.answers import Answer, Answers
from evernear.console.classes import images_by_class, waiting_classes
from evernear.console.label_target import LabelTarget, open_label_target
from evernear.console.queue import Item, Queue
from evernear.console.random_queries import RandomQueries
from evernear.console.released import ReleasedAnswers
from evernear.console.releases import Releases
from evernear.console.run_records import RunRecords
from evernear.console.runs import Done, Runner
from evernear.console.submissions import Submissions
from evernear.console.suspects import Suspect, load_suspects
from evernear.errors import EvernearError, ServingError, SettingsError, StoreError
from evernear.release.manifest import ReleaseManifest
from evernear.serving.gallery_images import GalleryImages
from evernear.settings import Settings
from evernear.settings.permissions import Right

QUEUE_ITEMS = 240


@dataclass
class Backend:
    """The objects that the pages read and change. If the source is not writable, ``answers`` is
    None and ``fault`` is the reason."""

    settings: Settings
    store: Store
    runner: Runner
    answers: Answers | None
    target: LabelTarget | None
    fault: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """A lock that serializes changes to the source."""

    def __post_init__(self) -> None:
        self.releases = Releases(self.store)
        self.records = RunRecords(self.store)
        self.queue = Queue(self.store)
        self.random_queries = RandomQueries(self.store)
        self.submissions = Submissions(self.store)
        self.gallery = GalleryImages(self.store)
        self.released = ReleasedAnswers(self.store)

    @staticmethod
    def open(settings: Settings, store: Store, runner: Runner) -> "Backend":
        """Open the backend for a store and a source. If the source is not writable, users cannot
        submit answers.

        Raises:
            StoreError: the store is unavailable.
        """
        try:
            target = open_label_target(settings.data.source, settings.data)
        except EvernearError as error:
            return Backend(settings, store, runner, None, None, str(error))
        answers = Answers(store, target)
        answers.recover()
        return Backend(settings, store, runner, answers, target)

    def require_answers(self) -> tuple[Answers, LabelTarget]:
        """The answers, and the source to which the answers are written.

        Raises:
            SettingsError: the source is not writable.
        """
        if self.answers is None or self.target is None:
            raise SettingsError(self.fault)
        return self.answers, self.target

    def latest(self) -> dict[str, Answer]:
        """The effective answer for each image, oldest first."""
        return self.answers.latest() if self.answers else {}

    def live(self) -> ReleaseManifest | None:
        """The manifest of the live release, or None before the first release."""
        champion = self.releases.champion()
        record = self.releases.find(champion.version) if champion else None
        return record.manifest if record else None

    def classes(self, latest: Mapping[str, Answer]) -> list[str]:
        """The classes that users may name: classes of the source itself, followed by the other
        classes of the ``latest`` answers."""
        own = self.target.labels if self.target else []
        return list(dict.fromkeys([*own, *sorted(images_by_class(latest.values()))]))

    def waiting(self, latest: Mapping[str, Answer], live: ReleaseManifest | None) -> dict[str, int]:
        """The number of images of each class that waits for more images from review."""
        own = self.target.labels if self.target else []
        used = {*own, *self.settings.classes.current_labels(live.labels if live else ())}
        return waiting_classes(latest.values(), used, self.settings.validation.min_class_images)

    def pending(self, answered: Collection[str]) -> list[Item]:
        """Images to review: user submissions, followed by logged queries. Each kind is sorted
        newest first."""
        sent = self.submissions.pending(answered, QUEUE_ITEMS)
        known = {*answered, *(item.id for item in sent)}
        return [*sent, *self.queue.pending(known, QUEUE_ITEMS - len(sent))]

    def find(self, image: str) -> Item | None:
        """A pending or reviewed image, or None if the image no longer exists."""
        return self.submissions.find(image) or self.queue.find(image)

    def original(self, image: str) -> bytes:
        """The image file under review: the submitted file or, for a logged query, the network's
        input.

        Raises:
            ServingError: the file no longer exists.
        """
        sent = self.submissions.original(image)
        item = None if sent else self.queue.find(image)
        if sent is None and item is None:
            raise ServingError("The image is no longer in the queue: it was too old, or deleted.")
        return sent or (item.image if item else b"")

    def perform(
        self, request: Request, right: Right, what: str, act: Callable[[User], Done], release: str = ""
    ) -> Done:
        """Call ``act`` if the user who made ``request`` has the permission ``right``, and record
        the result in the audit log.

        Raises:
            HTTPException: the user does not have the permission.
        """
        user: User = request.state.user
        event = AuditEvent(
            request=f"console-{uuid4().hex[:16]}",
            at=self.now(),
            who=user.name,
            what=what,
            result="done",
            where="console",
            release=release,
        )
        try:
            require(request, right)
            done = act(user)
        except HTTPException as error:
            self._audit_failure(event.model_copy(update={"result": "refused", "detail": str(error.detail)}))
            raise
        except EvernearError as error:
            self._audit_failure(event.model_copy(update={"result": "failed", "detail": str(error)}))
            raise
        audit.write(self.store, event.model_copy(update={"run": done.run}))
        return done

    def _audit_failure(self, event: AuditEvent) -> None:
        with suppress(StoreError):  # the failure itself is displayed
            audit.write(self.store, event)

    def suspects(self) -> tuple[Suspect, ...]:
        """The source images with suspect labels."""
        return load_suspects(self.store, self.settings.data.source)

    @staticmethod
    def now() -> datetime:
        """The current time in UTC."""
        return datetime.now(UTC)
