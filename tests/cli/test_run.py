"""The progress display of `evernear run` and `evernear demo`."""

import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evernear import demo, local_run
from evernear.cli import run
from evernear.cli.options import run_settings
from evernear.errors import SettingsError
from evernear.progress import Event
from evernear.settings import Settings, of_run
from tests.command_line import evernear

HIDDEN, SHOWN, ERASED = "\x1b[?25l", "\x1b[?25h", "\x1b[2K"


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", ["run", "demo"])
def test_interrupt_restores_the_cursor(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    written = io.StringIO()
    monkeypatch.setattr(run, "Console", lambda **_: Console(file=written, force_terminal=True))
    monkeypatch.setattr(local_run, "run", interrupted)
    monkeypatch.setattr(demo, "demo", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(run, command)()
    assert HIDDEN in written.getvalue()
    assert written.getvalue().rindex(SHOWN) > written.getvalue().rindex(HIDDEN)


@pytest.mark.parametrize("command", ["run", "reindex"])
@pytest.mark.parametrize(
    ("options", "reread"), [([], False), (["--reread"], True), (["--set", "data.reread=true"], True)]
)
def test_reread_is_a_setting_of_one_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, options: list[str], reread: bool
) -> None:
    received: list[Settings] = []

    def run_pipeline(settings: Settings, *_: object) -> None:
        received.append(settings)
        raise SettingsError("not run")

    monkeypatch.setattr(local_run, "run", run_pipeline)
    evernear(command, "--workdir", tmp_path, "--source", "digits", *options)
    (settings,) = received
    assert settings.data.reread == reread
    assert local_run.pipeline_arguments(settings)["settings"]["data"]["reread"] == reread


def test_pipe_is_not_animated_even_if_colors_are_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in notebooks and CI
    monkeypatch.setattr(local_run, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert "\x1b" not in capsys.readouterr().err


def test_finished_step_has_its_own_line_on_a_terminal() -> None:
    written = io.StringIO()
    with run._Progress(Console(file=written, force_terminal=True, no_color=True)) as show:
        for kind, message in (("started", ""), ("progress", "file a[/b].png"), ("finished", "label [/red]")):
            show(Event(at=datetime.now(UTC), step="ingest", kind=kind, message=message, duration_s=1.5))
    output = written.getvalue().replace("\r", "").replace("\n", ERASED).split(ERASED)
    assert any(line.endswith("  ok ingest        1.5 s  label [/red]") for line in output)
    assert any("file a[/b].png" in line for line in output)


def test_retired_and_renamed_classes_are_settings_of_the_run() -> None:
    settings = run_settings(retire=["cat", "sea lion"], rename=["old=new", "a=b=c", r"x\=y=z\=w"])
    assert settings.classes.retired == ("cat", "sea lion")
    assert settings.classes.renamed == {"old": "new", "a": "b=c", "x=y": "z=w"}
    assert settings.classes.current_labels(["cat", "old", "new", "dog"]) == ("new", "dog")
    assert of_run({"classes": settings.classes.model_dump()}).classes == settings.classes
    assert run_settings().classes.former_names == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rename": ["old"]}, "--rename 'old' is not OLD=NEW"),
        ({"rename": [r"a\=b"]}, "is not OLD=NEW; a = in the old name is written"),
        ({"rename": ["a=b"], "retire": ["b"]}, "'b' is both retired and renamed"),
        ({"rename": ["a=b", "b=c"]}, "'b' is both the old and the new name"),
    ],
)
def test_contradictory_class_changes_are_rejected(options: dict[str, list[str]], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        run_settings(**options)
