"""An efficient closed loop of keep-alive clients, which share the machine with the measured
server.

HTTP/1.1 is implemented directly, with one `asyncio.Protocol` per connection; requests are built
before the measurement and responses are checked after it. gRPC uses grpc.aio with one channel for
all clients.
"""

import asyncio
import gc
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import psutil
import uvloop

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"
_LONGEST_S = 60.0


@dataclass(frozen=True)
class Target:
    """An address and its requests: complete HTTP requests, or gRPC messages if ``grpc_method`` is
    set."""

    host: str
    port: int
    requests: tuple[bytes, ...]
    prediction_of: Callable[[bytes], bytes] = lambda body: body
    """The JSON in a response's body."""
    grpc_method: str = ""
    grpc_metadata: tuple[tuple[str, str], ...] = ()


@dataclass
class Outcome:
    """The result of one measurement. ``answers`` counts (image, body) of successes, ``faults`` the
    other statuses."""

    duration_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    answers: Counter[tuple[int, bytes]] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    cores: dict[str, float] = field(default_factory=dict)
    """CPU seconds per second of ``load`` and of each group of server processes."""

    @property
    def rps(self) -> float:
        return len(self.latencies_s) / self.duration_s

    def percentile_ms(self, quantile: float) -> float:
        ordered = sorted(self.latencies_s)
        return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)] * 1e3 if ordered else math.nan


def measure(
    target: Target, concurrency: int, seconds: float, warm_up_s: float, processes: Callable[[], list[psutil.Process]]
) -> Outcome:
    """Send requests to ``target`` from ``concurrency`` clients; count those that end within
    ``seconds``, or until the first one ends."""
    gc.collect()
    gc.disable()
    try:
        return uvloop.run(_measure(target, concurrency, seconds, warm_up_s, processes))
    finally:
        gc.enable()


async def _measure(
    target: Target, concurrency: int, seconds: float, warm_up_s: float, processes: Callable[[], list[psutil.Process]]
) -> Outcome:
    loop = _Loop(target.requests)
    clients = await (_grpc_clients if target.grpc_method else _http_clients)(target, concurrency, loop)
    await asyncio.sleep(warm_up_s)
    before, started_s = _cpu_seconds(processes()), time.perf_counter()
    loop.outcome = Outcome()
    await asyncio.sleep(seconds)
    while not loop.outcome.latencies_s and time.perf_counter() - started_s < _LONGEST_S:
        await asyncio.sleep(0.1)  # the naive handler takes seconds for a photograph, at times
    outcome, duration_s = loop.outcome, time.perf_counter() - started_s
    after = _cpu_seconds(processes())
    loop.ended = True
    for close in clients:
        close()
    await asyncio.sleep(0.2)  # wait for requests in flight
    outcome.duration_s = duration_s
    outcome.cores = {name: round((after[name] - before.get(name, 0.0)) / duration_s, 2) for name in after}
    return outcome


class _Loop:
    """Selects the next image and counts responses."""

    def __init__(self, requests: Sequence[bytes]) -> None:
        self.requests = requests
        self.outcome = Outcome()
        self.ended = False
        self._next = 0

    def next(self) -> int:
        self._next = (self._next + 1) % len(self.requests)
        return self._next

    def count(self, image: int, latency_s: float, fault: str, body: bytes) -> None:
        if self.ended:
            return
        self.outcome.latencies_s.append(latency_s)
        if fault:
            self.outcome.faults[fault] += 1
        else:
            self.outcome.answers[image, body] += 1


class _HttpClient(asyncio.Protocol):
    def __init__(self, loop: _Loop) -> None:
        self._loop = loop
        self._transport: Any = None
        self._received = b""
        self._response_size = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._received, self._response_size = b"", 0
        self._image = self._loop.next()
        self._started_s = time.perf_counter()
        self._transport.write(self._loop.requests[self._image])

    def data_received(self, data: bytes) -> None:
        received = self._received = self._received + data if self._received else data
        if not self._response_size:
            head = received.find(_HEAD_END)
            if head < 0:
                return
            length = _LENGTH.search(received, 0, head)
            self._response_size = head + len(_HEAD_END) + (int(length[1]) if length else 0)
        if len(received) < self._response_size:
            return
        latency_s = time.perf_counter() - self._started_s
        status = received[9:12]
        fault = "" if status.startswith(b"2") else status.decode()
        self._loop.count(self._image, latency_s, fault, received[received.index(_HEAD_END) + 4 :])
        if not self._loop.ended:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._loop.ended:
            self._loop.count(self._image, time.perf_counter() - self._started_s, "connection lost", b"")


async def _http_clients(target: Target, concurrency: int, loop: _Loop) -> list[Callable[[], object]]:
    running = asyncio.get_running_loop()
    opened = [
        await running.create_connection(lambda: _HttpClient(loop), target.host, target.port) for _ in range(concurrency)
    ]
    return [transport.close for transport, _ in opened]


async def _grpc_clients(target: Target, concurrency: int, loop: _Loop) -> list[Callable[[], object]]:
    channel = grpc.aio.insecure_channel(f"{target.host}:{target.port}")
    call = channel.unary_unary(target.grpc_method)  # bytes in, bytes out

    async def client() -> None:
        while not loop.ended:
            image, started_s = loop.next(), time.perf_counter()
            try:
                body, fault = await call(target.requests[image], metadata=target.grpc_metadata), ""
            except grpc.aio.AioRpcError as error:
                body, fault = b"", error.code().name
            loop.count(image, time.perf_counter() - started_s, fault, body)

    tasks = [asyncio.create_task(client()) for _ in range(concurrency)]
    return [lambda: asyncio.create_task(channel.close(None)), *(task.cancel for task in tasks)]


def _cpu_seconds(processes: Sequence[psutil.Process]) -> dict[str, float]:
    """Return CPU seconds by program name, which separates java from its Python workers."""
    seconds = defaultdict[str, float](float)
    for process in processes:
        times = process.cpu_times()
        seconds["frontend" if process.name().startswith("java") else "python"] += times.user + times.system
    own = time.process_time()
    return {**seconds, "load": own}
