"""Handle Ctrl-C: exit code 130 and a message that states what remains."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from evernear.errors import UserInterruptError


@contextmanager
def message_on_interrupt(message: str) -> Generator[None]:
    """Convert Ctrl-C in the body to a `UserInterruptError` with ``message``."""
    try:
        yield
    except KeyboardInterrupt:
        raise UserInterruptError(message) from None


@contextmanager
def stop_on_signals(stop: threading.Event, message: str) -> Generator[None]:
    """Set ``stop`` on SIGTERM and Ctrl-C, so that the body can finish its current work. Ctrl-C then
    raises `UserInterruptError` with ``message``. SIGTERM raises nothing, so the exit code is 0."""
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    yield
    if signal.SIGINT in received:
        raise UserInterruptError(message)
