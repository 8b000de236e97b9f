"""What Ctrl-C means to a command: it ends with a sentence that says what remains, and with exit code 130."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from evernear.errors import UserInterruptError


@contextmanager
def interrupt_says(sentence: str) -> Generator[None]:
    """Let Ctrl-C end the body with ``sentence``.

    Raises:
        UserInterruptError: Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise UserInterruptError(sentence) from None


@contextmanager
def stop_on_signals(stop: threading.Event, sentence: str) -> Generator[None]:
    """Set ``stop`` at SIGTERM and at Ctrl-C, so that the body finishes what is under way.

    Raises:
        UserInterruptError: it was Ctrl-C; ``sentence`` says what remains. After SIGTERM the exit code is 0.
    """
    received: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        received.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    yield
    if signal.SIGINT in received:
        raise UserInterruptError(sentence)
