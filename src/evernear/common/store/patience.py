"""How long a request waits for a store that is unreachable or overloaded.

A stock Kubeflow Pipelines never runs a failed step again (docs/decisions/), so a step waits here.
Servers do not, because they serve without the store, and ask again later.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

from evernear.common.retry import doubling, retry
from evernear.errors import TransientStoreError

IN_A_POD_S, ON_A_LAPTOP_S = 600.0, 60.0
PAUSES_S = (1.0, 15.0)
"""First and longest."""
REPORT_INTERVAL_S = 10.0

_T = TypeVar("_T")


class _Patience:
    """Time for one outage, which all threads share, and which ends with a successful request. After
    an outage that took longer, requests fail at once until one succeeds."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._limit_s = IN_A_POD_S if "KUBERNETES_SERVICE_HOST" in os.environ else ON_A_LAPTOP_S
        self._report = report
        self._lock = threading.Lock()
        self._since_s: float | None = None
        self._reported_s = -math.inf

    def wait_for(self, request: Callable[[], _T]) -> _T:
        result = retry(request, on=TransientStoreError, pauses_s=self._pauses_s(), report=self._tell)
        with self._lock:
            self._since_s = None
        return result

    def _pauses_s(self) -> Iterator[float]:
        """Drawn after each failure, of which the first may begin an outage."""
        with self._lock:
            since_s = self._since_s = self._since_s or time.monotonic()
        for pause_s in doubling(*PAUSES_S):
            left_s = since_s + self._limit_s - time.monotonic()
            if left_s <= 0:
                return
            yield min(pause_s, left_s)

    def _tell(self, error: Exception, _: float) -> None:
        with self._lock:
            now_s, since_s = time.monotonic(), self._since_s
            if since_s is None or now_s - self._reported_s < REPORT_INTERVAL_S:
                return
            self._reported_s = now_s
        left_s = max(0.0, since_s + self._limit_s - now_s)
        self._report(f"waiting for the store, {left_s:.0f} s left: {error}")


_holders: list[_Patience] = []


@contextmanager
def patient(report: Callable[[str], None]) -> Generator[None]:
    """Let requests of this process, in all threads, wait for the store. ``report`` receives a
    sentence with the time left. Inside another such block, the outer one counts."""
    patience = _holders[-1] if _holders else _Patience(report)
    _holders.append(patience)
    try:
        yield
    finally:
        _holders.remove(patience)


def patiently(request: Callable[[], _T]) -> _T:
    """The result of ``request``, repeated while it raises `TransientStoreError` in a `patient`
    block."""
    return _holders[-1].wait_for(request) if _holders else request()
