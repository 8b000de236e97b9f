"""The progress display of `evernear run` and `evernear demo`."""

import io
import socket
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evernear.cli import demo, run
from evernear.cli.options import run_settings
from evernear.cli.pipeline import server_settings
from evernear.common.progress import Event, RunCommand
from evernear.common.store import open_store
from evernear.errors import SettingsError, TrainingError
from evernear.kubeflow import local_run
from evernear.release.registry import Registry
from evernear.serving.endpoints import home_of
from evernear.serving.torchserve import reserved_ports
from evernear.settings import Settings, load, of_run
from evernear.settings.layers import FILE
from tests.command_line import evernear
from tests.ports import free_ports
from tests.real.scenarios.workspace import PORTS
from tests.releases import MakeRelease, settings_on_free_ports

HIDDEN, SHOWN, ERASED = "\x1b[?25l", "\x1b[?25h", "\x1b[2K"


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", ["run", "demo"])
def test_interrupt_restores_the_cursor(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    written = io.StringIO()
    monkeypatch.setattr(run, "Console", lambda **_: Console(file=written, force_terminal=True))
    monkeypatch.setattr(local_run, "run_pipeline", interrupted)
    monkeypatch.setattr(demo, "run_demo", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(run, command)()
    assert HIDDEN in written.getvalue()
    assert written.getvalue().rindex(SHOWN) > written.getvalue().rindex(HIDDEN)


@pytest.mark.parametrize("command", ["run", "reindex"])
@pytest.mark.parametrize(
    ("options", "once"),
    [
        ([], {}),
        (["--reread"], {"reread": True}),
        (["--moved-from", "s3://old/images"], {"moved_from": "s3://old/images"}),
        (
            ["--retire", "cat", "--retire", "sea lion", "--rename", "old=new", "--rename", r"x\=y=z\=w"],
            {"classes": {"retired": ["cat", "sea lion"], "renamed": {"old": "new", "x=y": "z=w"}}},
        ),
    ],
)
def test_what_is_true_of_one_run_is_not_kept(
    pretend_run: list[RunCommand], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, options: list[str],
    once: dict[str, Any],
) -> None:  # fmt: skip
    received: list[Any] = []
    run_pipeline = local_run.run_pipeline
    monkeypatch.setattr(local_run, "run_pipeline", lambda *given: received.append(given[-1]) or run_pipeline(*given))
    evernear(command, "--workdir", tmp_path, "--source", "digits", *options)
    assert received == [once]
    chosen = local_run.pipeline_arguments(load(environment={}), once)["settings"]
    assert of_run(chosen).model_dump(mode="json", exclude_defaults=True).items() >= once.items()
    assert list(pretend_run[0].later[1 : 1 + len(options)]) == options
    kept = tomllib.loads((tmp_path / FILE).read_text())
    named = {"dataset": "old-images"} if "moved_from" in once else {}
    assert kept == {"data": {"source": "digits", **named}}


def demo_settings(monkeypatch: pytest.MonkeyPatch, *options: object) -> tuple[Settings, dict[str, Any]]:
    received: list[tuple[Settings, dict[str, Any]]] = []
    monkeypatch.setattr(demo, "run_demo", lambda settings, *_, **named: received.append((settings, named)))
    assert evernear("demo", *options).returncode == 0
    return received[0]


def test_demo_without_a_class_runs_on_a_folder_and_logs_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings, named = demo_settings(monkeypatch, "--without", "7", "--workdir", tmp_path)
    assert settings.data.source == f"folder:{tmp_path}/digits-without-7"
    assert settings.serving.query_log == "images"
    assert named["unseen"] == tmp_path / "digits-7"
    assert len(list(named["unseen"].glob("*.png"))) == 179
    assert named["command"].later[:3] == ("demo", "--without", "7")
    settings, _ = demo_settings(
        monkeypatch, "--without", "7", "--workdir", tmp_path, "--set", "serving.query_log=figures"
    )
    assert settings.serving.query_log == "figures", "--set overrides it"
    settings, named = demo_settings(monkeypatch, "--workdir", tmp_path)
    assert (settings.data.source, named["unseen"]) == ("digits", None)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--without", "x"], "'x' is not a class of the digits; choose one of 0 to 9."),
        (["--without", "7", "--source", "mnist"], "--without is for the digits and cannot be combined with --source."),
    ],
)
def test_demo_says_what_is_wrong_with_its_class(tmp_path: Path, options: list[str], sentence: str) -> None:
    result = evernear("demo", "--workdir", tmp_path / "new", *options)
    assert result.returncode != 0
    assert sentence in result.stderr
    assert not (tmp_path / "new").exists()


def test_demo_without_a_class_needs_a_directory_without_other_releases(
    tmp_path: Path, make_release: MakeRelease
) -> None:
    registry = Registry(open_store((tmp_path / "store").as_uri()))
    registry.set_champion(registry.publish(make_release().archive).manifest.version, None)
    result = evernear("demo", "--without", "7", "--workdir", tmp_path)
    assert result.returncode != 0
    assert "has a release of the dataset digits, not of digits-without-7; add --workdir" in result.stderr


def test_demo_takes_free_ports_unless_the_user_chose_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second = free_ports(2)
    (tmp_path / FILE).write_text(f"[serving]\ninference_port = {first}\nmetrics_port = {second}\n")
    with socket.create_server(("127.0.0.1", first)), socket.create_server(("127.0.0.1", second)):
        settings, _ = demo_settings(monkeypatch, "--workdir", tmp_path, "--set", f"serving.metrics_port={second}")
    assert settings.serving.inference_port not in (first, second)
    assert settings.serving.metrics_port == second, "the check of the run names it"
    assert demo_settings(monkeypatch, "--workdir", tmp_path)[0].serving.inference_port == first


def test_runs_at_the_same_time_have_different_ports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each starts its server at its end, a minute after it has looked for ports."""
    serving = settings_on_free_ports()
    first, ports = serving.inference_port, [getattr(serving, name) for name in PORTS]
    options = [word for name in PORTS for word in ("--set", f"serving.{name}={getattr(serving, name)}")]
    (tmp_path / FILE).write_text(f"[serving]\ninference_port = {first}\n")
    with reserved_ports(serving, home_of(tmp_path / "first")):
        refused = evernear("run", "--workdir", tmp_path / "second", *options)
        settings, _ = demo_settings(monkeypatch, "--workdir", tmp_path)
    assert refused.returncode != 0
    assert f"In use on 127.0.0.1: port {first} by another run" in refused.stderr
    assert settings.serving.inference_port not in ports
    assert demo_settings(monkeypatch, "--workdir", tmp_path)[0].serving.inference_port == first


def test_error_of_a_step_is_printed_once() -> None:
    written, at = io.StringIO(), datetime.now(UTC)
    failed = "The disk is full: free some space."
    with run._Progress(Console(file=written, width=200)) as show:
        show(Event(at=at, step="train", kind="failed", message=failed))
        show(Event(at=at, step="probe", kind="failed", message="Out of memory"))
        show(Event(at=at, step="notify", kind="finished", message=f"failed at train: {failed} Release 1 is live"))
    lines = [line.split(" s  ")[1] for line in written.getvalue().splitlines()]
    assert lines == ["failed", "Out of memory", "failed at train. Release 1 is live"]


def test_pipe_is_not_animated_even_if_colors_are_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in notebooks and CI
    monkeypatch.setattr(local_run, "run_pipeline", interrupted)
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


@pytest.mark.parametrize("terminal", [True, False])
def test_note_has_its_own_line(terminal: bool) -> None:
    written = io.StringIO()
    with run._Progress(Console(file=written, force_terminal=terminal, no_color=True, width=40)) as show:
        for kind, message in (("started", ""), ("note", "Add --preset photos [to] the command."), ("finished", "ok")):
            show(Event(at=datetime.now(UTC), step="validate", kind=kind, message=message))
    lines = written.getvalue().replace("\r", "").replace("\n", ERASED).split(ERASED)
    assert sum(line.endswith("     Add --preset photos [to] the command.") for line in lines) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rename", "old"], "--rename 'old' is not OLD=NEW"),
        (["--rename", "old=new", "--rename", "old=newer"], "--rename gives 'old' two new names; give it one."),
        (["--rename", r"a\=b"], "is not OLD=NEW; a = in the old name is written"),
        (["--rename", "a=b", "--retire", "b"], "'b' is both retired and renamed"),
        (["--rename", "a=b", "--rename", "b=c"], "'b' is both the old and the new name"),
        (["--set", "data.reread=true"], "No setting 'data.reread'"),
    ],
)
def test_contradictory_class_changes_are_rejected(tmp_path: Path, options: list[str], message: str) -> None:
    done = evernear("run", "--workdir", tmp_path / "new", *options)
    assert done.returncode == SettingsError.exit_code
    assert message in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.fixture
def pretend_run(monkeypatch: pytest.MonkeyPatch) -> list[RunCommand]:
    """Runs that end after their validation; the list receives their commands."""
    commands: list[RunCommand] = []

    def end_after_validation(settings: Settings, show: Any, *_: Any, command: RunCommand | None = None) -> None:
        commands.append(command or _[1])
        state = "failed" if settings.data.source == "mnist" else "finished"
        show(Event(at=datetime.now(UTC), step="validate", kind=state, message=""))
        raise TrainingError("The loss is not finite.")

    monkeypatch.setattr(local_run, "run_pipeline", end_after_validation)
    monkeypatch.setattr(demo, "run_pipeline", end_after_validation)
    return commands


@pytest.mark.parametrize("command", ["run", "reindex", "demo"])
def test_first_run_keeps_its_settings_for_later_commands(
    pretend_run: list[RunCommand], tmp_path: Path, command: str
) -> None:
    words = ["--source", "folder:images", "--preset", "quick", "--workdir", "my dir", "--set", "target=registry"]
    (tmp_path / "my dir").mkdir()
    first = evernear(command, *words, cwd=tmp_path)
    assert first.stderr.endswith("evernear: The loss is not finite.\n")
    kept = "Kept in my dir/evernear.toml for later commands: preset, target, data.source."
    assert kept in first.stdout + first.stderr
    assert pretend_run.pop() == RunCommand(typed=(command, *words), later=(command, "--workdir", "my dir"))
    assert "champion" in evernear("status", "--workdir", "my dir", cwd=tmp_path).stdout

    again = evernear(command, "--workdir", "my dir", "--set", "train.epochs=3", cwd=tmp_path)
    assert "my dir/evernear.toml has other settings; this run uses:\n  train.epochs: 2 -> 3\n--rem" in again.stderr
    assert pretend_run.pop().later == (command, "--workdir", "my dir", "--set", "train.epochs=3")
    assert "has other settings" not in evernear(command, cwd=tmp_path / "my dir").stderr
    remembered = evernear(command, "--workdir", "my dir", "--set", "train.epochs=3", "--remember", cwd=tmp_path)
    assert "--remember keeps" not in remembered.stderr
    assert pretend_run.pop().later == (command, "--workdir", "my dir")
    assert run_settings(workdir=tmp_path / "my dir").train.epochs == 3


def test_run_whose_images_are_not_valid_keeps_nothing(pretend_run: list[RunCommand], tmp_path: Path) -> None:
    evernear("run", "--source", "mnist", "--workdir", "mine", cwd=tmp_path)
    assert not (tmp_path / "mine").exists()
    evernear("run", "--source", "digits", "--workdir", "mine", cwd=tmp_path)
    assert 'source = "digits"' in (tmp_path / "mine" / FILE).read_text()


def test_directory_of_the_environment_is_not_repeated(pretend_run: list[RunCommand], tmp_path: Path) -> None:
    environment = {"EVERNEAR_WORKDIR": str(tmp_path / "mine"), "EVERNEAR_TARGET": "registry"}
    evernear("run", "--preset", "quick", environment=environment, cwd=tmp_path)
    assert pretend_run.pop().later == ("run",)
    assert (tmp_path / "mine" / FILE).read_text().endswith('\n\npreset = "quick"\n')


def test_secret_in_the_command_is_refused(pretend_run: list[RunCommand], tmp_path: Path) -> None:
    done = evernear("run", "--source", "s3://ada:hunter2@bucket/p", "--workdir", "mine", cwd=tmp_path)
    assert done.returncode == SettingsError.exit_code
    assert done.stderr.startswith("evernear: Setting data.source = s3://***@bucket/p contains a secret, and ")
    assert not pretend_run
    assert not (tmp_path / "mine").exists()


def test_secret_of_the_environment_is_masked_in_the_command(pretend_run: list[RunCommand], tmp_path: Path) -> None:
    environment = {"AWS_SECRET_ACCESS_KEY": "hunter2-hunter2"}
    words = ("run", "--source", "s3://bucket/hunter2-hunter2", "--workdir", "mine")
    done = evernear(*words, cwd=tmp_path, environment=environment)
    (command,) = pretend_run
    assert command.typed == ("run", "--source", "s3://bucket/***", "--workdir", "mine")
    assert "data.source contains a secret and is not kept in mine/evernear.toml" in done.stderr
    assert "hunter2" not in (tmp_path / "mine" / FILE).read_text()


def test_kubeflow_commands_do_not_read_the_settings_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "evernear-work").mkdir()
    (tmp_path / "evernear-work" / FILE).write_text('[pipeline]\nendpoint = "http://other.example"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert server_settings().endpoint == ""
