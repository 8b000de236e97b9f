"""Untrusted names are escaped on terminals, in logs and in reports."""

import io
import json
import logging
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from rich.console import Console

from evernear.cli import app as command_line
from evernear.cli import demo, runs, triggers
from evernear.cli import run as run_command
from evernear.common.output import (
    JsonFormatter,
    LogFormatter,
    log_fields,
    print_json,
    print_line,
    print_table,
    printable,
)
from evernear.common.progress import EVENTS_VARIABLE, Event, read_events, step
from evernear.errors import DataError, EvernearError
from evernear.kubeflow.local_run import RunResult
from evernear.kubeflow.runs import KfpStep, Run, State
from evernear.reporting.notify import NextStep
from evernear.settings import Settings
from evernear.triggers.watch.schedule_state import CheckReport

HOSTILE = "\x1b]0;owned\x07\x1b[31m[red]cat[/red]\u202egod\nevernear: all is well\r\x00\x9b2J\u2028\udce4"
"""Terminal escapes, rich markup, bidirectional overrides, line breaks and a NUL."""
SAFE = r"\x1b]0;owned\x07\x1b[31m[red]cat[/red]\u202egod\nevernear: all is well\r\x00\x9b2J\u2028\udce4"
"""The escaped form of `HOSTILE`."""
NOW = datetime(2026, 11, 22, 9, 0, tzinfo=UTC)


def assert_escaped(text: str) -> None:
    """Assert that ``text`` contains `HOSTILE` only in escaped form."""
    assert SAFE in text
    assert all(line.isprintable() for line in text.split("\n"))


@pytest.fixture
def console() -> Console:
    """A terminal without colors, so that all escape sequences originate from the names."""
    return Console(file=io.StringIO(), force_terminal=True, no_color=True, highlight=False, width=1000)


def terminal_output(console: Console) -> str:
    """The terminal output without rich's own styles and cursor movements."""
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[(0|1|2K|1A|\?25[lh])m?|\r", "", console.file.getvalue())


def test_unprintable_characters_are_escaped() -> None:
    assert printable(HOSTILE) == SAFE
    assert printable(SAFE) == SAFE
    assert printable("naïve 猫 \\ ok") == "naïve 猫 \\ ok"
    assert printable("\x1b" * 3 + "abc", 4) == r"\x1b\x1b\x1ba..."


@given(st.text(st.characters(exclude_categories=())))
@settings(deadline=None)
def test_every_text_becomes_one_encodable_line(text: str) -> None:
    output = printable(text)
    assert output.isprintable()
    output.encode()  # fails for a surrogate


def test_line_and_json_output(capsys: pytest.CaptureFixture[str]) -> None:
    class Named(BaseModel):
        name: str
        share: float

    print_line(HOSTILE)
    print_line(HOSTILE, sys.stderr)
    out, err = capsys.readouterr()
    assert (out, err) == (SAFE + "\n", SAFE + "\n")
    name = HOSTILE.replace("\udce4", "\x7fä")
    print_json([Named(name=name, share=float("nan"))])
    line = capsys.readouterr().out
    assert line.isascii()
    assert line.rstrip("\n").isprintable()
    assert json.loads(line) == [{"name": name, "share": None}]


def test_log_record_is_one_line_with_an_escaped_traceback() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogFormatter("%(levelname)s %(message)s"))
    log = logging.Logger("test")
    log.addHandler(handler)
    log.info("release of %s", HOSTILE)
    assert stream.getvalue() == f"INFO release of {SAFE}\n"
    try:
        raise ValueError("\x1b[31m\u202e")
    except ValueError:
        log.exception("failed")
    assert stream.getvalue().splitlines()[-1] == r"ValueError: \x1b[31m\u202e"


def test_json_log_record_has_the_fields_of_its_context() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    log = logging.Logger("test")
    log.addHandler(handler)
    with log_fields(request="7f3a", run=""):
        log.warning("release of %s", HOSTILE)
    try:
        raise ValueError("\x1b[31m\u202e")
    except ValueError:
        log.exception("failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert stream.getvalue().replace("\n", "").isprintable()
    assert datetime.fromisoformat(first.pop("time")).tzinfo is not None
    assert first == {
        "level": "WARNING",
        "logger": "test",
        "message": f"release of {HOSTILE}",
        "request": "7f3a",
    }
    assert "request" not in second
    assert second["traceback"].startswith("Traceback")


def test_step_events_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events = tmp_path / "events.jsonl"
    monkeypatch.setenv(EVENTS_VARIABLE, str(events))

    def fail(error: Exception) -> None:
        with step("ingest", "run", tmp_path.as_uri()) as running:
            running.report(HOSTILE)
            raise error

    for error, raised in ((DataError(HOSTILE), SystemExit), (ValueError(HOSTILE), ValueError)):
        with pytest.raises(raised):
            fail(error)
    out, err = capsys.readouterr()
    assert_escaped(out)
    assert_escaped(err)
    assert len(out.splitlines()) == 6
    for event in read_events(events)[0]:
        assert event.message.isprintable()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_run_progress_is_escaped(console: Console, is_terminal: bool) -> None:
    console._force_terminal = is_terminal
    with run_command._Progress(console) as show:
        for kind in ("started", "progress", "finished", "failed"):
            show(Event(at=NOW, step="validate", kind=kind, message=HOSTILE))
    assert_escaped(terminal_output(console))


def test_run_summary_is_escaped(capsys: pytest.CaptureFixture[str], console: Console) -> None:
    result = RunResult(
        release=HOSTILE,
        promoted=True,
        state="promoted",
        summary=HOSTILE,
        reasons=(HOSTILE,),
        metrics={},
        paths={"log": f"/{HOSTILE}/log.txt"},
        steps_s={},
        wall_s=0.0,
        page=f"/{HOSTILE}/run.html",
        next_steps=(NextStep(HOSTILE, HOSTILE),),
    )
    run_command._print_result(result)
    out = capsys.readouterr().out
    assert_escaped(out)
    assert len(out.splitlines()) == 6
    demo._print_verdict(result, console)
    demo._print_next_steps(Settings(), result, console, keep=True, unseen=None)
    assert_escaped(terminal_output(console))


def test_command_error_is_escaped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise EvernearError(HOSTILE)

    monkeypatch.setattr(command_line, "app", fails)
    with pytest.raises(SystemExit):
        command_line.main()
    err = capsys.readouterr().err
    assert_escaped(err)
    assert len(err.splitlines()) == 1


def run(state: State) -> Run:
    steps = (KfpStep(name=HOSTILE, state=State.FAILED, error=HOSTILE),)
    texts = dict.fromkeys(("id", "name", "pipeline", "pipeline_version", "url", "error"), HOSTILE)
    return Run(state=state, created=NOW, ended=NOW, steps=steps, parameters={}, key="", **texts)


def test_pipeline_server_messages_are_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], console: Console
) -> None:
    class Runs:
        def show(self, run_id: str) -> Run:
            states.pop()
            return run(State.FAILED if not states else State.RUNNING)

    states = [1, 2]
    monkeypatch.setattr(runs, "Console", lambda **_: console)
    monkeypatch.setattr(runs, "outcome_of", lambda *_: None)
    monkeypatch.setattr(runs, "POLL_S", 0.0)
    with pytest.raises(EvernearError):
        runs.follow(Runs(), run(State.RUNNING), as_json=False)
    assert_escaped(terminal_output(console))
    assert_escaped(capsys.readouterr().out)
    runs.show(run(State.FAILED), None, as_json=False)
    out = capsys.readouterr().out
    assert_escaped(out)
    assert len(out.splitlines()) == 2


def test_watcher_output_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    texts = {"action": HOSTILE, "reasons": (HOSTILE,), "faults": (HOSTILE,), "proposal": HOSTILE}
    triggers._show(CheckReport.model_construct(at=NOW, figures={HOSTILE: 1.0}, **texts), as_json=False)
    out = capsys.readouterr().out
    assert_escaped(out)
    assert len(out.splitlines()) == 5


def test_tables_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "size"), [(HOSTILE, "1"), ("b", "2")])
    head, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(SAFE)
    assert head.index("size") == first.index("1", len(SAFE)) == second.index("2")


def test_joiner_is_kept_only_within_an_emoji() -> None:
    farmer = "\U0001f469\u200d\U0001f33e"
    assert printable(f"{farmer} \u2764\ufe0f\u200d\U0001f525") == f"{farmer} \u2764\ufe0f\u200d\U0001f525"
    assert printable("ki\u200dwi \U0001f469\u200d") == "ki\\u200dwi \U0001f469\\u200d"
