"""A store and a source to review."""

from review_queue import source, store

__all__ = ["source", "store"]
