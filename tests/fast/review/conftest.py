"""A source to review."""

from tests.review_queue import reads, source

__all__ = ["reads", "source"]
