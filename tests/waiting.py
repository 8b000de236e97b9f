import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def until(condition: Callable[[], Value], timeout_s: float = 60) -> Value:
    """Poll ``condition`` until it returns a true value, and return that value."""
    end_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end_s, "the condition did not become true"
        time.sleep(0.02)
    return value
