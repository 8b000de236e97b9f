"""Clients that send requests continuously and count the outcomes."""

import http.client
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from evernear.errors import EvernearError
from evernear.serving.client import Client, Target

TIMEOUT_S = 30


@dataclass
class Calls:
    """Outcomes of all requests: predictions by release, and failures."""

    predictions: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.predictions.values()) + len(self.failures)


@contextmanager
def calling(
    port: int,
    body: bytes,
    token: str,
    clients: int,
    pause_s: float = 0.0,
    *,
    host: str = "127.0.0.1",
    path: str = "/predictions/embedding",
) -> Iterator[Calls]:
    """Send REST requests continuously; every third client opens a new connection for each
    request."""
    calls, stop = Calls(), threading.Event()
    headers = {"Authorization": f"Bearer {token}"}

    def call_once(connection: http.client.HTTPConnection) -> bool:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        answer = response.read().decode()
        if response.status == 200:
            calls.predictions[re.findall(r'"version": ?"([^"]*)"', answer)[0]] += 1
        else:
            calls.failures.append(f"{time.monotonic():.2f}: {response.status} {answer}")
        return not response.will_close

    def call(keep_alive: bool) -> None:
        while not stop.wait(pause_s):
            connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
            try:
                while call_once(connection) and keep_alive and not stop.wait(pause_s):
                    pass
            except (OSError, http.client.HTTPException) as error:
                calls.failures.append(f"{time.monotonic():.2f}: {error!r}")
            finally:
                connection.close()

    with _running([threading.Thread(target=call, args=[number % 3 > 0]) for number in range(clients)], stop):
        yield calls


@contextmanager
def calling_grpc(port: int, image: bytes, token: str, clients: int, pause_s: float = 0.0) -> Iterator[Calls]:
    """Send gRPC requests continuously, each client on its own connection and without retries."""
    calls, stop = Calls(), threading.Event()
    target = Target("127.0.0.1", port, "embedding", "grpc", token=lambda: token, timeout_s=TIMEOUT_S)

    def call() -> None:
        with Client(target) as client:
            while not stop.wait(pause_s):
                try:
                    calls.predictions[client.predict(image).version] += 1
                except EvernearError as error:
                    calls.failures.append(f"{time.monotonic():.2f}: {error}")

    with _running([threading.Thread(target=call) for _ in range(clients)], stop):
        yield calls


@contextmanager
def _running(threads: list[threading.Thread], stop: threading.Event) -> Iterator[None]:
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
