"""A store with logged queries, and a source with one image of each of two classes."""

import base64
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evernear.common.store import Store
from evernear.serving.query_log_files import LoggedQuery, Period
from tests.dataset_images import saved

NOW = datetime.now(UTC)


def png(value: int) -> bytes:
    return saved(Image.fromarray(np.full((8, 8), value, np.uint8)))


def log_queries(store: Store, *images: bytes, candidates: tuple[str, ...] = ("cat", "dog"), day: int = 0) -> None:
    at = NOW - timedelta(days=day)
    period = Period(version="v", since=at, until=at, queries=len(images), unknown=1)
    rows = [
        LoggedQuery(
            at=at, pred="cat", dist=0.5, unknown=True, image=base64.b64encode(image).decode(), candidates=candidates
        )
        for image in images
    ]
    lines = "".join(row.model_dump_json() + "\n" for row in [period, *rows])
    store.put(f"queries/{at:%Y%m%d}/{at:%Y%m%dT%H%M%SZ}-v-host-1-{day}.jsonl", lines.encode())


@pytest.fixture
def reads(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys that are read from the store from now on."""
    keys: list[str] = []
    find = store.find
    monkeypatch.setattr(store, "find", lambda key: (keys.append(key), find(key))[1])
    return keys


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for number, label in enumerate(["cat", "dog"]):
        (tmp_path / "source" / label).mkdir(parents=True)
        Image.fromarray(np.full((8, 8), 100 + number, np.uint8)).save(tmp_path / "source" / label / "a.png")
    return tmp_path / "source"
