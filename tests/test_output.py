"""Names that others chose decide nothing on a terminal, in a log or in a report but how they are read themselves."""

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
from releases import MakeRelease, PackedRelease
from rich.console import Console
from typer.testing import CliRunner

from evernear import cli, demo
from evernear.cli import predict, runs, watch
from evernear.cli import run as run_command
from evernear.cli.tables import print_table
from evernear.errors import DataError, EvernearError
from evernear.kubeflow.runs import Run, State, Step
from evernear.local_run import RunResult
from evernear.output import LogFormatter, print_json, print_line, printable
from evernear.progress import EVENTS_VARIABLE, Event, read_events, step
from evernear.release.registry import Registry
from evernear.settings import Settings
from evernear.store import open_store
from evernear.triggers.watch.schedule_state import CheckReport

HOSTILE = "\x1b]0;owned\x07\x1b[31m[red]cat[/red]\u202egod\nevernear: all is well\r\x00\x9b2J\u2028\udce4"
"""What steers a terminal, what rich takes for a color, what turns a line around, and lines and an end of its own."""
SAFE = r"\x1b]0;owned\x07\x1b[31m[red]cat[/red]\u202egod\nevernear: all is well\r\x00\x9b2J\u2028\udce4"
"""The same, as people read it."""
NOW = datetime(2026, 11, 22, 9, 0, tzinfo=UTC)


def shown_safely(text: str) -> None:
    """``text`` shows `HOSTILE` and obeys none of it."""
    assert SAFE in text
    assert all(line.isprintable() for line in text.split("\n"))


@pytest.fixture
def console() -> Console:
    """A terminal without colors: what escapes it is sent come from the names."""
    return Console(file=io.StringIO(), force_terminal=True, no_color=True, highlight=False, width=1000)


def sent_to(console: Console) -> str:
    """What stands on the terminal, without the styles and the moves of the cursor that rich makes itself."""
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[(0|1|2K|1A|\?25[lh])m?|\r", "", console.file.getvalue())


def test_what_is_not_printable_is_shown_as_an_escape() -> None:
    assert printable(HOSTILE) == SAFE
    assert printable(SAFE) == SAFE
    assert printable("naïve 猫 \\ ok") == "naïve 猫 \\ ok"
    assert printable("\x1b" * 3 + "abc", 4) == r"\x1b\x1b\x1ba..."


@given(st.text(st.characters(exclude_categories=())))
@settings(deadline=None)
def test_every_text_becomes_one_line_that_can_be_written(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    shown.encode()  # a surrogate could not be


def test_a_line_and_json(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_log_record_is_one_line_and_its_traceback_is_harmless() -> None:
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


def test_a_step_and_its_events(
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
    shown_safely(out)
    shown_safely(err)
    assert len(out.splitlines()) == 6
    for event in read_events(events)[0]:
        assert event.message.isprintable()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_progress_of_a_run(console: Console, is_terminal: bool) -> None:
    console._force_terminal = is_terminal
    with run_command._Progress(console) as show:
        for kind in ("started", "progress", "finished", "failed"):
            show(Event(at=NOW, step="validate", kind=kind, message=HOSTILE))
    shown_safely(sent_to(console))


def test_the_end_of_a_run(capsys: pytest.CaptureFixture[str], console: Console) -> None:
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
    )
    run_command._print_result(result)
    out = capsys.readouterr().out
    shown_safely(out)
    assert len(out.splitlines()) == 3
    demo._print_verdict(result, console)
    demo._print_next_steps(Settings(), result, console, keep=True)
    shown_safely(sent_to(console))


def test_an_error_of_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise EvernearError(HOSTILE)

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit):
        cli.main()
    err = capsys.readouterr().err
    shown_safely(err)
    assert len(err.splitlines()) == 1


@pytest.fixture(scope="module")
def release(make_release: MakeRelease) -> PackedRelease:
    return make_release()


def test_the_registry(
    release: PackedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A class of any name, in a release that is sound otherwise."""
    store = (tmp_path / "store").as_uri()
    registry = Registry(open_store(store))
    registry.publish(release.archive)
    name = HOSTILE.replace("\udce4", "ä")  # JSON holds no surrogate
    read = SAFE.replace(r"\udce4", "ä")

    def invoke(*words: str) -> str:
        done = CliRunner().invoke(cli.app, ["registry", *words, "--store", store])
        assert done.exit_code == 0, done.output
        assert all(line.isprintable() for line in done.output.split("\n"))
        return done.output

    invoke("promote", release.version, "--why", name)
    assert read in invoke("history")
    assert invoke("history", "--json").isascii()
    labels = (name, *release.manifest.labels[1:])
    get = Registry.get

    def renamed(registry: Registry, version: str, include_pruned: bool = False) -> object:
        record = get(registry, version, include_pruned=include_pruned)
        fields = {"labels": labels, "git_commit": name, "metrics": {name: 1.0}}
        return record.model_copy(update={"manifest": record.manifest.model_copy(update=fields)})

    monkeypatch.setattr(Registry, "get", renamed)
    shown = invoke("show", release.version)
    assert shown.count(read) >= 2
    assert json.loads(invoke("show", release.version, "--json"))["labels"][0] == name


def test_answers_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    near = [{"label": HOSTILE, "dist": 0.5}]
    answer = {"pred": HOSTILE, "dist": 0.5, "unknown": False, "neighbors": near, "version": HOSTILE}
    files = [(Path(HOSTILE), answer), (Path("b.png"), DataError(HOSTILE))]
    predict._print_table(iter(files), alone=False)
    shown = capsys.readouterr().out
    shown_safely(shown)
    assert shown.count(SAFE) == 5


def run(state: State) -> Run:
    steps = (Step(name=HOSTILE, state=State.FAILED, error=HOSTILE),)
    texts = dict.fromkeys(("id", "name", "pipeline", "pipeline_version", "url", "error"), HOSTILE)
    return Run(state=state, created=NOW, ended=NOW, steps=steps, parameters={}, key="", **texts)


def test_what_the_pipeline_server_says(
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
    shown_safely(sent_to(console))
    shown_safely(capsys.readouterr().out)
    runs.show(run(State.FAILED), None, as_json=False)
    out = capsys.readouterr().out
    shown_safely(out)
    assert len(out.splitlines()) == 2


def test_what_the_watcher_saw(capsys: pytest.CaptureFixture[str]) -> None:
    texts = {"action": HOSTILE, "reasons": (HOSTILE,), "faults": (HOSTILE,), "proposal": HOSTILE}
    watch._show(CheckReport.model_construct(at=NOW, figures={HOSTILE: 1.0}, **texts), as_json=False)
    out = capsys.readouterr().out
    shown_safely(out)
    assert len(out.splitlines()) == 5


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "size"), [(HOSTILE, "1"), ("b", "2")])
    head, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(SAFE)
    assert head.index("size") == first.index("1", len(SAFE)) == second.index("2")
