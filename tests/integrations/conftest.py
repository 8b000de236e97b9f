"""The record of a run that has ended."""

from tests.ended_run import ended_run

__all__ = ["ended_run"]
