"""What `evernear run` and `evernear demo` show while they work, and leave behind on the terminal."""

import io
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from evernear import demo, local_run
from evernear.cli import run
from evernear.progress import Event

HIDDEN, SHOWN, ERASED = "\x1b[?25l", "\x1b[?25h", "\x1b[2K"


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", ["run", "demo"])
def test_who_interrupts_a_run_has_the_cursor_back(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    written = io.StringIO()
    monkeypatch.setattr(run, "Console", lambda **_: Console(file=written, force_terminal=True))
    monkeypatch.setattr(local_run, "run", interrupted)
    monkeypatch.setattr(demo, "demo", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(run, command)()
    assert HIDDEN in written.getvalue()
    assert written.getvalue().rindex(SHOWN) > written.getvalue().rindex(HIDDEN)


def test_a_step_that_ended_has_a_line_of_its_own_on_a_terminal() -> None:
    written = io.StringIO()
    with run._Progress(Console(file=written, force_terminal=True, no_color=True)) as show:
        for kind, message in (("started", ""), ("progress", "file a[/b].png"), ("finished", "label [/red]")):
            show(Event(at=datetime.now(UTC), step="ingest", kind=kind, message=message, duration_s=1.5))
    shown = written.getvalue().replace("\r", "").replace("\n", ERASED).split(ERASED)
    assert any(line.endswith("  ok ingest        1.5 s  label [/red]") for line in shown)
    assert any("file a[/b].png" in line for line in shown)
