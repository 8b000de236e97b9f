"""Stores with snapshots of small images of noise, and with releases of the shared system."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evernear.common.store import Store, open_store
from evernear.release.registry import Registry
from tests.releases import PackedRelease, System


def write_images(directory: Path, count: int, seed: int) -> None:
    """Write ``count`` images of each of the classes a and b."""
    rng = np.random.default_rng(seed)
    for label in "ab":
        (directory / label).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (8, 8), np.uint8)
            Image.fromarray(pixels).save(directory / label / f"{seed}-{number}.png")


def publish(store: Store, system: System, releases: list[PackedRelease]) -> list[PackedRelease]:
    """Publish releases with their snapshot, the first one as champion."""
    for info in system.dataset.store.list("datasets/"):
        store.put(info.key, system.dataset.store.get(info.key))
    for release in releases:
        Registry(store).publish(release.archive)
    Registry(store).set_champion(releases[0].version, None)
    return releases


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store((tmp_path / "store").as_uri())
    return open_store(f"s3://{request.getfixturevalue('bucket')}/team")
