"""Batch images across requests: recognizing a batch takes hardly longer than recognizing one image.

BentoML and MLServer wait for more requests with a timer, which BentoML adapts to the recent load.
No timer is needed here: while the thread is busy with an earlier batch, new requests form the next
one. A single request therefore starts immediately, and batches grow with the load.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from evernear.serving.decoding import OverloadedError

Request = TypeVar("Request")
Result = TypeVar("Result")


class Batcher(Generic[Request, Result]):
    """Passes concurrent requests to ``function`` in batches, on one thread.

    ``function`` returns a result for each request in a batch. The total size of a batch is at most
    ``batch_size``, and that of the waiting requests at most ``max_waiting``, except for a single
    larger request.
    """

    def __init__(
        self, function: Callable[[list[Request]], Sequence[Result]], *, batch_size: int, max_waiting: int
    ) -> None:
        self._function = function
        self._batch_size = batch_size
        self._max_waiting = max_waiting
        self._thread = ThreadPoolExecutor(1, "batch")
        self._queue: deque[tuple[Request, int, asyncio.Future[Result]]] = deque()
        self._is_idle = True

    async def run(self, request: Request, size: int) -> Result:
        """If the caller is cancelled, ``request`` leaves the queue.

        Raises:
            OverloadedError: too many requests are waiting.
        """
        waiting = [size for _, size, result in self._queue if not result.done()]
        if waiting and sum(waiting) + size > self._max_waiting:
            raise OverloadedError("Too many requests are waiting to be answered; try again in a second.")
        loop = asyncio.get_running_loop()
        result = loop.create_future()
        if not self._queue:
            loop.call_soon(self._start)  # with all requests that arrive in this iteration of the event loop
        self._queue.append((request, size, result))
        return await result

    def close(self) -> None:
        """End the thread after its current batch."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        if self._is_idle and (batch := self._next_batch()):
            self._is_idle = False
            requests = [request for request, _ in batch]
            done = asyncio.get_running_loop().run_in_executor(self._thread, self._function, requests)
            done.add_done_callback(lambda done: self._end([result for _, result in batch], done))

    def _end(self, batch: list[asyncio.Future[Result]], done: asyncio.Future[Sequence[Result]]) -> None:
        self._is_idle = True
        self._start()
        error = done.exception()
        for number, result in enumerate(batch):
            if result.done():  # cancelled
                continue
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(done.result()[number])

    def _next_batch(self) -> list[tuple[Request, asyncio.Future[Result]]]:
        batch: list[tuple[Request, asyncio.Future[Result]]] = []
        total = 0
        while self._queue and (not batch or total + self._queue[0][1] <= self._batch_size):
            request, size, result = self._queue.popleft()
            if not result.done():
                batch.append((request, result))
                total += size
        return batch
