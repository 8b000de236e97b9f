"""Batch images across requests: recognizing a batch takes hardly longer than recognizing one image.

BentoML and MLServer wait for more requests with a timer, which BentoML adapts to the recent load.
No timer is needed here: while an earlier batch is being answered, new requests form the next one. A
single request therefore starts immediately, and batches grow with the load.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from functools import partial
from typing import Generic, TypeVar

from evernear.serving.decoding import OverloadedError

Request = TypeVar("Request")
Result = TypeVar("Result")


class Batcher(Generic[Request, Result]):
    """Passes concurrent requests to ``function`` in batches, ``at_once`` at the same time.

    ``function`` returns a result for each request in a batch, whose requests have one ``kind``. The
    total size of a batch is at most ``batch_size``, and that of the waiting requests at most
    ``max_waiting``, except for a single larger request.
    """

    def __init__(
        self,
        function: Callable[[list[Request]], Awaitable[Sequence[Result]]],
        *,
        batch_size: int,
        max_waiting: float = math.inf,
        at_once: int = 1,
    ) -> None:
        self._function = function
        self._batch_size = batch_size
        self._max_waiting = max_waiting
        self._queue: deque[tuple[Request, int, Hashable, asyncio.Future[Result]]] = deque()
        self._at_once = at_once
        self._running: set[asyncio.Future[Sequence[Result]]] = set()

    async def run(self, request: Request, size: int, kind: Hashable = None) -> Result:
        """If the caller is cancelled, ``request`` leaves the queue.

        Raises:
            OverloadedError: too many requests are waiting.
        """
        waiting = [size for _, size, _, result in self._queue if not result.done()]
        if waiting and sum(waiting) + size > self._max_waiting:
            raise OverloadedError("Too many requests are waiting to be answered; try again in a second.")
        loop = asyncio.get_running_loop()
        result = loop.create_future()
        if not self._queue:
            loop.call_soon(self._start)  # with all requests that arrive in this iteration of the event loop
        self._queue.append((request, size, kind, result))
        return await result

    def _start(self) -> None:
        while len(self._running) < self._at_once and (batch := self._next_batch()):
            results = [result for _, result in batch]
            self._running.add(done := asyncio.ensure_future(self._function([request for request, _ in batch])))
            done.add_done_callback(partial(self._end, results))

    def _end(self, batch: list[asyncio.Future[Result]], done: asyncio.Future[Sequence[Result]]) -> None:
        self._running.discard(done)
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
        common = None
        while self._queue:
            request, size, kind, result = self._queue[0]
            if batch and (kind != common or total + size > self._batch_size):
                break
            self._queue.popleft()
            if not result.done():
                batch.append((request, result))
                total, common = total + size, kind
        return batch
