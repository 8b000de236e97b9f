"""Handle Ctrl-C: the command ends with exit code 130 and a message that states what remains."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from evernear.errors import UserInterruptError


@contextmanager
def message_on_interrupt(message: str) -> Generator[None]:
    """Convert Ctrl-C in the context's body to an error with ``message``.

    Raises:
        UserInterruptError: on Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise UserInterruptError(message) from None


@contextmanager
def stop_on_signals(stop: threading.Event, message: str) -> Generator[None]:
    """Set ``stop`` on SIGTERM and Ctrl-C, so that the context's body can finish its current
    work.

    Raises:
        UserInterruptError: on Ctrl-C, with ``message``. SIGTERM does not raise an
            error, so the exit code is 0.
    """
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    yield
    if signal.SIGINT in received:
        raise UserInterruptError(message)
