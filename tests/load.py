"""Clients that send requests continuously and count the outcomes."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from evernear.errors import EvernearError
from evernear.serving.client import Client
from tests.waiting import until


@dataclass
class Calls:
    """Outcomes of all requests: predictions by release, and failures."""

    predictions: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.predictions.total() + len(self.failures)


@contextmanager
def calling(open_client: Callable[[], Client], image: bytes, clients: int, pause_s: float) -> Iterator[Calls]:
    """Send requests without retries. Every third client opens a new connection for each. Requests
    were answered before and after the body."""
    calls, stop = Calls(), threading.Event()

    def call(client: Client) -> None:
        try:
            calls.predictions[client.predict(image).version] += 1
        except EvernearError as error:
            calls.failures.append(str(error))

    def keep_calling(number: int) -> None:
        while not stop.wait(pause_s):
            with open_client() as client:
                call(client)
                while number % 3 and not stop.wait(pause_s):
                    call(client)

    def await_calls() -> None:
        enough = calls.total + 2 * clients
        until(lambda: calls.total >= enough, timeout_s=240)

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(keep_calling, number) for number in range(clients)]
        try:
            await_calls()
            yield calls
            await_calls()
        finally:
            stop.set()
    for future in running:
        future.result()
