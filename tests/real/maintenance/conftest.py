"""Stores with snapshots of small images of noise, and with releases of the shared system."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evernear.common.store import Store
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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test with a store runs with one in a directory and, if slow tests run, in a bucket."""
    if "store" in metafunc.fixturenames:
        metafunc.parametrize("store", ["file", pytest.param("s3", marks=pytest.mark.slow)], indirect=True)
