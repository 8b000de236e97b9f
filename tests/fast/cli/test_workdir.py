"""Every command reads the settings of its directory, and most refuse a mistyped directory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from evernear.cli.app import app
from evernear.common.outputs import MARKER, marker
from evernear.errors import DataError, SettingsError
from evernear.settings.layers import FILE

CREATES = (("run",), ("demo",))
ANYWHERE = ("demo", "deployment", "doctor", "pipeline", "pod", "prep", "run", "slack", "trial", "tune")
"""The first words of the commands that do not need a working directory."""
VALUES = {"release": "20260101.000000.00000000", "format": "folder", "keep": "1"}


def commands(command: Any, name: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands with ``--workdir``."""
    for word, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*name, word))
    if any(parameter.name == "workdir" for parameter in command.params):
        yield name, command


WITH_WORKDIR = dict(commands(get_command(app)))


def words(name: tuple[str, ...], tmp_path: Path) -> list[str]:
    """The command with a value for each argument and option that it requires."""
    value = tmp_path / "value.csv"
    value.write_text("id,label\n")
    required = [parameter for parameter in WITH_WORKDIR[name].params if parameter.required]
    command = list(name)
    for parameter in required:
        option = parameter.opts[:1] if parameter.param_type_name == "option" else []
        command += [*option, VALUES.get((*option, parameter.name)[0].lstrip("-"), str(value))]
    return command


def refused(*command: str) -> str:
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, SettingsError), done.output
    return str(done.exception)


@pytest.mark.parametrize("name", [name for name in WITH_WORKDIR if name not in CREATES], ids=" ".join)
def test_mistyped_workdir_is_refused_and_not_created(name: tuple[str, ...], tmp_path: Path) -> None:
    typo = tmp_path / "tpyo"
    message = refused(*words(name, tmp_path), "--workdir", str(typo))
    assert f"working directory {typo} does not exist" in message
    assert not typo.exists()


@pytest.mark.parametrize("name", [name for name in WITH_WORKDIR if name[0] not in ANYWHERE], ids=" ".join)
def test_forgotten_workdir_is_asked_for_and_not_created(
    name: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = words(name, tmp_path)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    missing = "The working directory evernear-work does not exist; "
    assert refused(*command) == f"{missing}name it with --workdir, or create it with `evernear run`."
    for other in ("photos-2024", "my mugs"):
        (here / other / "runs").mkdir(parents=True)
        (here / other / MARKER).write_bytes(marker("a working directory"))
    (here / "an export").mkdir()
    (here / "an export" / MARKER).write_bytes(marker("an export"))
    assert refused(*command) == f"{missing}name it with --workdir; this directory has my mugs, photos-2024."
    (here / "evernear").mkdir()
    assert refused(*command) == f"{missing}did you mean evernear?"
    assert not (here / "evernear-work").exists()


@pytest.mark.parametrize(
    "command", [["predict", "--target", "host", "7.png"], ["predict", "--format", "prep", "7.png"]]
)
def test_command_for_another_server_needs_no_workdir(command: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, command, env={"EVERNEAR_WORKDIR": str(tmp_path / "missing")})
    assert isinstance(done.exception, DataError), done.output  # there is no 7.png


def test_commands_for_a_store_need_no_workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = (tmp_path / "store").as_uri()
    for command in (["registry", "list", "--store", store], ["store", "check", "--set", f"store={store}"], ["status"]):
        done = CliRunner().invoke(app, command, env={"EVERNEAR_STORE": store})
        assert done.exit_code == 0, done.output
    assert not (tmp_path / "evernear-work").exists()


@pytest.mark.parametrize("name", WITH_WORKDIR, ids=" ".join)
def test_settings_of_the_directory_are_read(
    name: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = words(name, tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / FILE).write_text("[train]\nepoch = 3\n")
    sentence = f"mine/{FILE}: No setting 'train.epoch'; did you mean 'train.epochs'?"
    assert refused(*command, "--workdir", "mine") == sentence
    monkeypatch.setenv("EVERNEAR_WORKDIR", "mine")
    assert refused(*command) == sentence


@pytest.mark.parametrize("name", WITH_WORKDIR, ids=" ".join)
def test_empty_workdir_is_not_the_current_directory(
    name: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = words(name, tmp_path)
    sentence = "The working directory (--workdir or EVERNEAR_WORKDIR) is empty; name a directory."
    assert refused(*command, "--workdir", "") == sentence
    monkeypatch.setenv("EVERNEAR_WORKDIR", "")
    assert refused(*command) == sentence


def test_name_of_a_similar_directory_is_proposed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert f"did you mean {tmp_path / 'mine'}?" in refused("reindex", "--workdir", str(tmp_path / "mien"))
    assert "`evernear run`" in refused("status", "--set", f"workdir={tmp_path / 'other'}")


def test_commands_that_create_one_have_the_option() -> None:
    assert set(CREATES) <= WITH_WORKDIR.keys()
    assert len(WITH_WORKDIR) > 10
