"""A source to review, and its answers."""

from pathlib import Path

import pytest

from evernear.common.store import Store
from evernear.review.answers import Answers
from evernear.review.label_target import open_label_target
from tests.review_queue import reads, source

__all__ = ["reads", "source"]


@pytest.fixture
def answers(store: Store, source: Path) -> Answers:
    return Answers(store, open_label_target(f"folder:{source}"))
