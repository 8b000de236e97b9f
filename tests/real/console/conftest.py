"""A store and a source to review."""

from tests.review_queue import source, store

__all__ = ["source", "store"]
