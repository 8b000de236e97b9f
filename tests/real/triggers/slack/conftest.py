"""A bot between a loopback Slack and in-memory runs, with a clock that the test advances."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loopback.slack import SlackServer
from tests.real.triggers.slack.bot import ADA, Bot, MemoryRuns


@pytest.fixture
def slack() -> Iterator[SlackServer]:
    with SlackServer() as server:
        yield server
    assert server.refused_blocks == []


@pytest.fixture
def runs() -> MemoryRuns:
    return MemoryRuns()


@pytest.fixture
def bot(slack: SlackServer, runs: MemoryRuns, tmp_path: Path) -> Bot:
    """A bot that permits everything to Ada, and nothing to anyone else."""
    return Bot(slack, runs, tmp_path, start=(ADA.id,), promote=(ADA.id,))
