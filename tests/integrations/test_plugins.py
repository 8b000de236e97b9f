"""The core finds integrations, and says what to install or what failed."""

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from evernear.common import plugins
from evernear.common.plugins import Plugin
from evernear.common.run_record import RunRecord
from evernear.common.store import Store, open_store
from evernear.errors import SettingsError
from evernear.index.vectors import index_backend
from evernear.settings import IndexSettings

HEAVY = ("pymilvus", "optuna", "mlflow", "torch", "faiss", "numpy", "httpx", "opentelemetry.sdk", "typer")
OFFER = '''
import sys
from evernear.common.plugins import Command, Plugin
def greet() -> None:
    """Say hello."""
    import a_missing_library
def offline(record, page):
    raise TimeoutError("no answer from https://user:secret@tracker/")
PLUGIN = Plugin(install="evernear-greeter[all]", commands=lambda: [Command("greet", greet)], run_ended=offline)
'''


@pytest.fixture
def installed_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a package that has the entry points ``greeter`` and ``broken``."""
    metadata = tmp_path / "evernear_greeter-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: evernear-greeter\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        f"[{plugins.GROUP}]\nbroken = evernear_greeter:MISSING\ngreeter = evernear_greeter:PLUGIN\n"
    )
    (tmp_path / "evernear_greeter.py").write_text(OFFER)
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.plugins.cache_clear()
    yield tmp_path
    plugins.plugins.cache_clear()
    sys.modules.pop("evernear_greeter", None)


def test_finding_integrations_imports_no_heavy_library() -> None:
    program = f"import sys; from evernear.common.plugins import plugins; plugins(); print({HEAVY} & sys.modules.keys())"
    program = program.replace(f"{HEAVY}", f"set({HEAVY})")
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert completed.stdout == "set()\n"


def test_other_package_adds_a_command_and_a_broken_one_is_named(
    installed_plugin: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (greet,) = [command for command in plugins.commands() if command.name == "greet"]
    (warning,) = caplog.messages
    assert warning.startswith("The plug-in broken (evernear_greeter:MISSING) is left out: ")
    with pytest.raises(SettingsError, match=r"`pip install 'evernear-greeter\[all\]'`\.$"):
        greet.run()


def test_failure_at_the_end_of_a_run_is_a_warning_without_a_password(
    installed_plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = RunRecord(open_store((tmp_path / "store").as_uri()), "run-1")
    assert plugins.run_ended(record, "") == [
        "The plug-in of evernear-greeter[all] failed: no answer from https://***@tracker/."
    ]


def test_mistake_in_an_integration_is_no_missing_library() -> None:
    with pytest.raises(ModuleNotFoundError), Plugin(install="x").installed():
        import_module("evernear.no_such_module")


def test_unknown_backend_is_rejected_by_name() -> None:
    with pytest.raises(ValueError, match="should be one of faiss, milvus"):
        IndexSettings(backend="qdrant")
    unknown = pytest.raises(SettingsError, match="The index backend qdrant is unknown here; known: faiss, milvus")
    with unknown, index_backend("qdrant"):
        pytest.fail("it has no backend")


def test_every_move_of_the_champion_reaches_every_integration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[Store, str | None]] = []

    def failing(store: Store, before: str | None) -> list[str]:
        raise OSError("disk")

    def recording(store: Store, before: str | None) -> list[str]:
        seen.append((store, before))
        return ["not yet"]

    offers = (Plugin(install="first", champion_moved=failing), Plugin(install="second", champion_moved=recording))
    monkeypatch.setattr(plugins, "plugins", lambda: offers)
    store = open_store((tmp_path / "store").as_uri())
    plugins.champion_moved(store, None)
    assert seen == [(store, None)]
    assert caplog.messages == ["The plug-in of first failed: disk.", "not yet"]


def test_commands_of_integrations_are_importable_without_the_command_line() -> None:
    script = "from evernear.common import plugins; print(*sorted(command.name for command in plugins.commands()))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["trial", "tune"], "")
