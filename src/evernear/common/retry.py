import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")


def retry(
    attempt: Callable[[], _T],
    *,
    on: type[Exception] | tuple[type[Exception], ...],
    pauses_s: Iterable[float],
    report: Callable[[Exception, float], None] | None = None,
) -> _T:
    """Call ``attempt`` until it no longer raises ``on`` or ``pauses_s`` is exhausted. ``report``
    receives the exception and the next pause, which is drawn then, and may depend on the clock."""
    pauses = iter(pauses_s)
    while True:
        try:
            return attempt()
        except on as error:
            if (pause_s := next(pauses, None)) is None:
                raise
            if report is not None:
                report(error, pause_s)
        time.sleep(pause_s)


def doubling(first_s: float, longest_s: float) -> Iterator[float]:
    """An endless sequence of exponential backoff pauses in seconds."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)
