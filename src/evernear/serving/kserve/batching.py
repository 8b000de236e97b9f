"""Batch images across requests: recognizing a batch takes hardly longer than recognizing one image.

BentoML and MLServer wait for more requests with a timer, which BentoML adapts to the recent load.
No timer is needed here: while the threads are busy with earlier batches, new requests form the next
one. A single request therefore starts immediately, and batches grow with the load.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from evernear.serving.decoding import OverloadedError

Request = TypeVar("Request")
Result = TypeVar("Result")


@dataclass(eq=False)
class _Waiting(Generic[Request, Result]):
    request: Request
    size: int
    result: "asyncio.Future[Result]"


class Batcher(Generic[Request, Result]):
    """Passes concurrent requests to ``function`` in batches, on up to ``threads`` threads.

    For each request in a batch, ``function`` returns a result or an exception, which affects only
    this request. The total size of a batch is at most ``batch_size``, and that of the waiting
    requests at most ``max_waiting``, except for a single larger request.
    """

    def __init__(
        self,
        function: Callable[[list[Request]], Sequence[Result | Exception]],
        *,
        batch_size: int,
        max_waiting: int,
        threads: int = 1,
    ) -> None:
        self._function = function
        self._batch_size = batch_size
        self._max_waiting = max_waiting
        self._idle = threads
        self._threads = ThreadPoolExecutor(threads, "batch")
        self._queue: deque[_Waiting[Request, Result]] = deque()
        self._waiting = 0
        """Total size of the requests in the queue."""

    async def run(self, request: Request, size: int) -> Result:
        """If the caller is cancelled, ``request`` is removed from the queue.

        Raises:
            OverloadedError: too many requests are waiting.
        """
        if self._queue and self._waiting + size > self._max_waiting:
            raise OverloadedError("Too many requests are waiting to be answered; try again in a second.")
        loop = asyncio.get_running_loop()
        waiting = _Waiting[Request, Result](request, size, loop.create_future())
        if not self._queue and self._idle:
            loop.call_soon(self._start)  # with all requests that arrive in this iteration of the event loop
        self._queue.append(waiting)
        self._waiting += size
        try:
            return await waiting.result
        except asyncio.CancelledError:
            if waiting in self._queue:
                self._queue.remove(waiting)
                self._waiting -= size
            raise

    def _start(self) -> None:
        """Start batches as long as requests are waiting and threads are idle."""
        while self._queue and self._idle:
            batch = self._next_batch()
            self._idle -= 1
            requests = [waiting.request for waiting in batch]
            future = asyncio.get_running_loop().run_in_executor(self._threads, self._function, requests)
            future.add_done_callback(lambda done, batch=batch: self._end(batch, done))

    def _next_batch(self) -> list[_Waiting[Request, Result]]:
        batch: list[_Waiting[Request, Result]] = []
        size = 0
        while self._queue and (not batch or size + self._queue[0].size <= self._batch_size):
            batch.append(self._queue.popleft())
            size += batch[-1].size
        self._waiting -= size
        return batch

    def _end(
        self,
        batch: list[_Waiting[Request, Result]],
        done: "asyncio.Future[Sequence[Result | Exception]]",
    ) -> None:
        self._idle += 1
        self._start()
        error = done.exception()
        results = [error] * len(batch) if error is not None else done.result()
        for waiting, result in zip(batch, results, strict=True):
            if waiting.result.done():  # cancelled
                continue
            if isinstance(result, BaseException):
                waiting.result.set_exception(result)
            else:
                waiting.result.set_result(result)
