"""Shared by the tests of the watcher: a store with a champion, images for its source, and runs in
memory."""

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evernear.common.run_record import RunRecord
from evernear.common.store import Store, open_store
from evernear.data.shards import Dataset
from evernear.kubeflow.runs import Parameter, State
from evernear.release.archive_reader import open_release
from evernear.release.registry import Registry
from evernear.serving.configuration import QueryLogConfiguration
from evernear.serving.core import Predictor
from evernear.serving.query_log import QueryLog, ship_query_log
from evernear.serving.responses import Prediction
from evernear.settings import Settings
from evernear.triggers.requests import Request, RequestStore
from evernear.triggers.watch import decide, observe
from evernear.triggers.watch.watcher import Watcher
from tests.dataset_images import saved
from tests.digits import load_digits
from tests.real.triggers.memory_runs import RunsInMemory

NOON = datetime(2027, 3, 1, 12, tzinfo=UTC)
TRAINED_LABELS = 9  # of the digits; nines come later


def png(image: np.ndarray) -> bytes:
    return saved(Image.fromarray(image))


def digits(label: int | None = None) -> list[bytes]:
    """scikit-learn's digits as PNG files, all or those of one label."""
    pixels, labels = load_digits()
    images = np.rint(pixels * (255 / 16)).astype(np.uint8)
    return [png(image) for image, its in zip(images, labels, strict=True) if label is None or its == label]


def negatives(count: int) -> list[bytes]:
    """Digits in black on white: any network trained on white on black places them far away, however
    initialized."""
    pixels, _ = load_digits()
    images = np.rint(pixels[:count] * (255 / 16)).astype(np.uint8)
    return [png(255 - image) for image in images]


def noise(number: int) -> bytes:
    return png(np.random.default_rng(number).integers(0, 256, (8, 8), np.uint8))


def memory_runs(*parameters: str) -> RunsInMemory:
    """Runs of pipelines with these parameters."""
    return RunsInMemory([Parameter(name=name, type="STRING") for name in parameters], NOON, State.RUNNING)


@dataclass
class WatchedSystem:
    """A source of images, a store whose champion was trained on them, and a clock that a test
    advances."""

    images: Path
    directory: Path
    patch: pytest.MonkeyPatch
    now: datetime = NOON
    runs: RunsInMemory = field(default_factory=lambda: memory_runs("store", "source"))
    _added: list[Path] = field(default_factory=list[Path])

    @property
    def store(self) -> Store:
        return open_store((self.directory / "store").as_uri())

    @property
    def proposals(self) -> list[Request]:
        return list(RequestStore(self.store).list())

    def settings(self, **watch: object) -> Settings:
        return Settings.model_validate(
            {
                "workdir": self.directory / "work",
                "store": (self.directory / "store").as_uri(),
                "data": {"source": f"folder:{self.images}", "gallery_fraction": 0.2, "query_fraction": 0.1},
                "watch": watch,
            }
        )

    def watcher(
        self,
        runs: RunsInMemory | None = None,
        *,
        new_gallery_images: int = 30,
        new_train_share: float = decide.NEW_TRAIN_SHARE,
        min_queries: int = 40,
        drift_window_s: float = observe.DRIFT_WINDOW_S,
        **watch: object,
    ) -> Watcher:
        """A new one, as after a restart, with thresholds that suit a few images."""
        self.patch.setattr(decide, "NEW_GALLERY_IMAGES", new_gallery_images)
        self.patch.setattr(decide, "NEW_TRAIN_SHARE", new_train_share)
        self.patch.setattr(observe, "MIN_QUERIES", min_queries)
        self.patch.setattr(observe, "DRIFT_WINDOW_S", drift_window_s)
        cache = self.directory / "cache"
        cache.mkdir(exist_ok=True)
        return Watcher(self.settings(**watch), self.store, runs or self.runs, cache, lambda: self.now)

    def wait(self, **time: float) -> None:
        self.now += timedelta(**time)

    def add(self, label: str, files: Sequence[bytes]) -> None:
        """New files of a class."""
        for data in files:
            path = self.images / label / f"added-{len(self._added):05}.png"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            self._added.append(path)

    def remove_added(self) -> None:
        for path in self._added:
            path.unlink()
        self._added.clear()
        for folder in self.images.iterdir():
            if not any(folder.iterdir()):
                folder.rmdir()

    def champion(self) -> str:
        champion = Registry(self.store).champion()
        assert champion is not None
        return champion.version

    def dataset(self) -> Dataset:
        manifest = Registry(self.store).get(self.champion()).manifest
        dataset = Dataset.find(self.store, manifest.dataset_name, manifest.dataset_digest)
        assert dataset is not None
        return dataset

    def ask(self, images: Sequence[bytes], per_file: int = 200) -> None:
        """Classify ``images`` with the champion, in random order, and upload its query logs, at the
        test's time."""
        images = random.Random(0).sample(images, len(images))  # queries in order would be alike in time
        with_champion = self.directory / "champion"
        shutil.rmtree(with_champion, ignore_errors=True)
        Registry(self.store).fetch(self.champion(), with_champion / "release.mar")
        parts = open_release(with_champion / "release.mar", with_champion / "opened")
        predictor, logged = Predictor.open(parts), with_champion / "queries"
        settings = QueryLogConfiguration(directory=logged, images=False, sample=100, period_s=60, size_bytes=2**24)
        log = QueryLog(settings, parts)
        log._random.seed(0)  # the same sample in each run of a test
        for start in range(0, len(images), per_file):
            batch = predictor.predict_batch(images[start : start + per_file])
            predictions = [response for response in batch.responses if isinstance(response, Prediction)]
            log.record(predictions, batch.embeddings, batch.images)
            path = log.write_file()
            assert path is not None
            # The log uses the machine's clock; the watcher reads the time from the name.
            path.rename(path.with_name(f"{self.now - timedelta(minutes=1):%Y%m%dT%H%M%SZ}{path.name[16:]}"))
        ship_query_log(logged, self.store)

    def save_outcome(self, run: str, state: str) -> None:
        """Save the outcome of a run like its last step."""
        outcome = {"run": run, "state": state, "reasons": ["The gate says so."]}
        RunRecord(self.store, run).save(outcome=outcome)
