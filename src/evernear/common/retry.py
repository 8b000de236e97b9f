"""Exponential backoff."""

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import TypeVar

_T = TypeVar("_T")


def backoff_s(failures: int, first_s: float, longest_s: float) -> float:
    """Seconds to wait after that many consecutive failures: 0 after none, ``first_s`` after the
    first, and twice as long after each further one."""
    return min(first_s * 2 ** min(failures - 1, 20), longest_s) if failures else 0.0


def retry(
    attempt: Callable[[], _T],
    *,
    on: type[Exception] | tuple[type[Exception], ...],
    pauses_s: Iterable[float],
    when: Callable[[Exception], bool] = lambda _: True,
    report: Callable[[Exception, float], None] | None = None,
) -> _T:
    """Call ``attempt`` until it no longer raises an ``on`` for which ``when`` is true, or
    ``pauses_s`` is exhausted. ``report`` receives the exception and the next pause, which is drawn
    then, and may depend on the clock."""
    pauses = iter(pauses_s)
    while True:
        try:
            return attempt()
        except on as error:
            if not when(error) or (pause_s := next(pauses, None)) is None:
                raise
            if report is not None:
                report(error, pause_s)
        time.sleep(pause_s)


def doubling(first_s: float, longest_s: float) -> Iterator[float]:
    """An endless sequence of the pauses for `retry`."""
    return (backoff_s(failures, first_s, longest_s) for failures in count(1))
