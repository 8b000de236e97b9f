"""What `evernear run` and `evernear demo` show while they work, and leave behind on the terminal."""

import io
from typing import Any

import pytest
from rich.console import Console

from evernear import demo, local_run
from evernear.cli import journey
from evernear.settings import Settings

HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", ["run", "demo"])
def test_who_interrupts_a_run_has_the_cursor_back(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    written = io.StringIO()
    monkeypatch.setattr(journey, "Console", lambda **_: Console(file=written, force_terminal=True))
    monkeypatch.setattr(journey, "settings_of", lambda *_: Settings())
    monkeypatch.setattr(local_run, "run", interrupted)
    monkeypatch.setattr(demo, "demo", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(journey, command)()
    assert HIDDEN in written.getvalue()
    assert written.getvalue().rindex(SHOWN) > written.getvalue().rindex(HIDDEN)
