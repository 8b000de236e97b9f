"""How `Batcher` forms batches, with a function that waits until the test lets it go on."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from evernear.serving.decoding import OverloadedError
from evernear.serving.http.batching import Batcher


class Function:
    """Doubles each request, one batch per permission. 13 is a bug."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.begun, self.permitted = threading.Semaphore(0), threading.Semaphore(0)

    async def __call__(self, batch: list[int]) -> list[int]:
        return await asyncio.to_thread(self._double, batch)

    def _double(self, batch: list[int]) -> list[int]:
        self.batches.append(batch)
        self.begun.release()
        self.permitted.acquire()
        if 13 in batch:
            raise ZeroDivisionError
        return [2 * request for request in batch]


@pytest.fixture
def function() -> Iterator[Function]:
    function = Function()
    yield function
    function.permitted.release(100)


@asynccontextmanager
async def busy(batcher: Batcher[int, int], function: Function) -> AsyncIterator[None]:
    """The function works on request 0 until the end."""
    first = asyncio.create_task(batcher.run(0, 1))
    await asyncio.to_thread(function.begun.acquire)
    yield
    function.permitted.release(100)
    assert await first == 0


async def start(*coroutines: Coroutine[Any, Any, int]) -> list[asyncio.Task[int]]:
    """Tasks that have run until they wait."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    await asyncio.sleep(0)
    return tasks


def test_a_lone_request_waits_for_no_other(function: Function) -> None:
    async def run() -> None:
        batcher = Batcher(function, batch_size=32, max_waiting=32)
        function.permitted.release(3)
        assert [await batcher.run(n, 1) for n in (1, 2, 3)] == [2, 4, 6]

    asyncio.run(run())
    assert function.batches == [[1], [2], [3]]


def test_requests_that_wait_for_a_batch_form_the_next_one_up_to_its_size(function: Function) -> None:
    async def run() -> None:
        batcher = Batcher(function, batch_size=4, max_waiting=32)
        async with busy(batcher, function):
            tasks = await start(*(batcher.run(n, size) for n, size in ((1, 1), (2, 3), (3, 1), (4, 9), (5, 1))))
        assert await asyncio.gather(*tasks) == [2, 4, 6, 8, 10]

    asyncio.run(run())
    assert function.batches == [[0], [1, 2], [3], [4], [5]]


def test_a_batch_has_requests_of_one_kind_in_their_order(function: Function) -> None:
    async def run() -> None:
        batcher = Batcher(function, batch_size=32, max_waiting=32)
        async with busy(batcher, function):
            tasks = await start(*(batcher.run(n, 1, kind) for n, kind in enumerate("aabba", 1)))
            tasks[0].cancel()
        assert await asyncio.gather(*tasks[1:]) == [4, 6, 8, 10]

    asyncio.run(run())
    assert function.batches == [[0], [2], [3, 4], [5]]


def test_several_batches_run_at_once_up_to_the_limit(function: Function) -> None:
    async def run() -> None:
        batcher = Batcher(function, batch_size=2, max_waiting=32, at_once=3)
        tasks = await start(*(batcher.run(n, 1) for n in range(8)))
        for _ in range(3):
            await asyncio.to_thread(function.begun.acquire)
        assert not function.begun.acquire(blocking=False)
        function.permitted.release(100)
        assert await asyncio.gather(*tasks) == [2 * n for n in range(8)]

    asyncio.run(run())
    assert sorted(function.batches) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_full_queue_refuses_until_it_has_room(function: Function) -> None:
    async def run() -> None:
        batcher = Batcher(function, batch_size=4, max_waiting=3)
        async with busy(batcher, function):
            tasks = await start(batcher.run(1, 1), batcher.run(2, 2))
            with pytest.raises(OverloadedError, match="try again"):
                await batcher.run(3, 1)
        await asyncio.gather(*tasks)
        assert await batcher.run(4, 1) == 8

    asyncio.run(run())
    assert function.batches == [[0], [1, 2], [4]]


def test_a_request_larger_than_the_queue_is_accepted_if_none_waits(function: Function) -> None:
    async def run() -> None:
        batcher = Batcher(function, batch_size=4, max_waiting=3)
        async with busy(batcher, function):
            tasks = await start(batcher.run(1, 1000))
            with pytest.raises(OverloadedError):
                await batcher.run(2, 1)
        assert await tasks[0] == 2

    asyncio.run(run())


def test_a_cancelled_request_leaves_the_queue_and_its_place(function: Function) -> None:
    async def run() -> None:
        batcher = Batcher(function, batch_size=32, max_waiting=2)
        async with busy(batcher, function):
            cancelled, waiting = await start(batcher.run(1, 1), batcher.run(2, 1))
            cancelled.cancel()
            (third,) = await start(batcher.run(3, 1))
        assert await asyncio.gather(waiting, third) == [4, 6]
        assert cancelled.cancelled()

    asyncio.run(run())
    assert function.batches == [[0], [2, 3]]


def test_cancelling_all_that_wait_leaves_a_batcher_that_works(function: Function) -> None:
    async def run() -> None:
        batcher = Batcher(function, batch_size=32, max_waiting=32)
        (unstarted,) = await start(batcher.run(1, 1))
        unstarted.cancel()
        function.permitted.release(100)
        assert await batcher.run(2, 1) == 4

    asyncio.run(run())


def test_a_caller_that_is_cancelled_during_its_batch_does_not_disturb_the_others(function: Function) -> None:
    async def run() -> None:
        batcher = Batcher(function, batch_size=32, max_waiting=32)
        cancelled, other = await start(batcher.run(1, 1), batcher.run(2, 1))
        await asyncio.to_thread(function.begun.acquire)
        cancelled.cancel()
        function.permitted.release()
        assert await other == 4

    asyncio.run(run())


def test_a_batch_that_raises_fails_and_the_next_one_succeeds(function: Function) -> None:
    async def run() -> None:
        batcher = Batcher(function, batch_size=32, max_waiting=32)
        function.permitted.release(2)
        results = await asyncio.gather(batcher.run(1, 1), batcher.run(13, 1), return_exceptions=True)
        assert [type(result) for result in results] == [ZeroDivisionError] * 2
        assert await batcher.run(2, 1) == 4

    asyncio.run(run())
