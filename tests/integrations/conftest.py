"""The record of a run that has ended."""

from tests.ended_run import record

__all__ = ["record"]
