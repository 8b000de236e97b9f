"""Fixtures: import ``cluster`` into a conftest.py to use it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from loopback.kubernetes.cluster import LoopbackCluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LoopbackCluster]:
    """An empty cluster on loopback."""
    with LoopbackCluster(tmp_path) as running:
        yield running
