"""Refuse what makes tests slow or unsteady: torch, processes, sockets and sleeping.

TorchServe is a process. A socket pair, which asyncio uses, is neither bound nor connected.
"""

import importlib.abc
import sys
import time
from collections.abc import Generator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import pytest
import urllib3  # noqa: F401 - binds a socket when it is imported, to see whether the machine has IPv6

FAST = Path(__file__).parent
SLOW_LIBRARIES = ("torch", "torchvision")
REFUSED = {
    "subprocess.Popen": "start a process",
    "os.fork": "start a process",
    "os.posix_spawn": "start a process",
    "socket.bind": "listen on a socket",
    "socket.connect": "connect a socket",
    "socket.getaddrinfo": "look up a host",
}
"""What audit events mean (https://docs.python.org/3/library/audit_events.html)."""
_sleep = time.sleep
_running: str | None = None
"""The fast test, or the file with fast tests, that runs now."""


def _refuse(action: str) -> None:
    if _running and current_thread() is main_thread():  # others are of servers that tests in tests/real share
        pytest.fail(f"{_running} may not {action}: move it to tests/real.")


def _hook(event: str, _: tuple[Any, ...]) -> None:
    if _running and event in REFUSED:  # not after the end of the interpreter
        _refuse(REFUSED[event])


def _refusing_sleep(seconds: float) -> None:
    """Python 3.11 and 3.12 have no audit event for it."""
    _refuse("sleep")
    _sleep(seconds)


class _NoSlowLibraries(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname in SLOW_LIBRARIES:
            _refuse(f"import {fullname}")
        return None


sys.addaudithook(_hook)
time.sleep = _refusing_sleep
sys.meta_path.insert(0, _NoSlowLibraries())


def _run(name: str, path: Path) -> Generator[None, Any, Any]:
    global _running
    _running = name if path.is_relative_to(FAST) else None
    try:
        return (yield)
    finally:
        _running = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _run(item.nodeid, item.path))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """But not the teardown, which may stop the servers of tests in tests/real."""
    return (yield from _run(item.nodeid, item.path))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    return (yield from _run(collector.nodeid, getattr(collector, "path", FAST.parent)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fail if something other than a test, such as a plugin, has loaded torch."""
    if all(item.path.is_relative_to(FAST) for item in session.items):
        loaded = [name for name in SLOW_LIBRARIES if name in sys.modules]
        if loaded:
            raise pytest.UsageError(f"{loaded[0]} is loaded, although all tests are in tests/fast.")
