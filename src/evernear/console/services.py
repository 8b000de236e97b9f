"""The services behind the pages."""

import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime

from evernear.common.store import Store
from evernear.console.runs import Runner, RunRecords
from evernear.errors import EvernearError, SettingsError
from evernear.release.registry import Registry
from evernear.review.answers import Answers, LabelTarget, open_label_target
from evernear.review.queue import Item, Queue
from evernear.review.random_queries import RandomQueries
from evernear.review.submissions import Submissions
from evernear.review.suspects import Suspect, load_suspects
from evernear.serving.gallery_images import GalleryImages
from evernear.settings import Settings

QUEUE_ITEMS = 240


@dataclass
class Services:
    """What the pages read and change. ``answers`` is None, with a ``fault``, if the source cannot be written."""

    settings: Settings
    store: Store
    runner: Runner
    answers: Answers | None
    target: LabelTarget | None
    fault: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Answers change the source one at a time."""

    def __post_init__(self) -> None:
        self.registry = Registry(self.store)
        self.records = RunRecords(self.store)
        self.queue = Queue(self.store)
        self.random_queries = RandomQueries(self.store)
        self.submissions = Submissions(self.store)
        self.gallery = GalleryImages(self.store)

    @staticmethod
    def open(settings: Settings, store: Store, runner: Runner) -> "Services":
        """The services of a store and a source. A source that cannot be written leaves the pages that only read.

        Raises:
            StoreError: the store is unavailable.
        """
        try:
            target = open_label_target(settings.data.source, settings.data)
        except EvernearError as error:
            return Services(settings, store, runner, None, None, str(error))
        answers = Answers(store, target)
        answers.recover()
        return Services(settings, store, runner, answers, target)

    def require_answers(self) -> tuple[Answers, LabelTarget]:
        """The answers and the source that they change.

        Raises:
            SettingsError: the source cannot be written.
        """
        if self.answers is None or self.target is None:
            raise SettingsError(self.fault)
        return self.answers, self.target

    def pending(self, answered: Collection[str]) -> list[Item]:
        """Images to review: those that people sent, then logged queries, each newest first."""
        sent = self.submissions.pending(answered, QUEUE_ITEMS)
        known = {*answered, *(item.id for item in sent)}
        return [*sent, *self.queue.pending(known, QUEUE_ITEMS - len(sent))]

    def find(self, image: str) -> Item | None:
        """An image to review, or one that was; None if it is gone."""
        return self.submissions.find(image) or self.queue.find(image)

    def suspects(self) -> tuple[Suspect, ...]:
        """The images of the source whose label looks wrong."""
        return load_suspects(self.store, self.settings.data.source)

    @staticmethod
    def now() -> datetime:
        """The time in UTC."""
        return datetime.now(UTC)
