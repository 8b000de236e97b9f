"""Global options, and Ctrl-C while the commands are being loaded."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import evernear
from evernear.cli.app import app
from evernear.common.store import Store
from evernear.release.registry import Registry
from tests.releases import MakeRelease


def test_version_is_printed() -> None:
    completed = CliRunner().invoke(app, ["--version"])
    assert (completed.exit_code, completed.output) == (0, f"evernear {evernear.__version__}\n")


def test_shells_complete_commands_and_options() -> None:
    def completed(words: str) -> set[str]:
        environment = {"_EVERNEAR_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return set(CliRunner().invoke(app, [], prog_name="evernear", env=environment).output.split())

    assert {"registry", "reindex", "report"} <= completed("evernear re")
    assert "--why" in completed("evernear registry promote --")
    assert completed("evernear run --preset p") == {"photos"}
    assert {"gate.beat_baseline=", "gate.significance="} <= completed("evernear run --set gate.")


def test_releases_are_completed(store: Store, make_release: MakeRelease) -> None:
    release = make_release()
    Registry(store).publish(release.archive)
    version = release.version
    words = f"evernear registry show --store {store.uri} {version[:4]}"
    environment = {"_EVERNEAR_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert version in CliRunner().invoke(app, [], prog_name="evernear", env=environment).output.split()


@pytest.mark.parametrize(
    ("word", "meant"),
    [("rollback", "registry rollback"), ("train", "run"), ("help", "--help"), ("version", "--version")],
)
def test_other_words_name_the_command_that_is_meant(word: str, meant: str) -> None:
    completed = CliRunner().invoke(app, [word])
    assert completed.exit_code == 2
    assert f"Did you mean `evernear {meant}`?" in " ".join(completed.output.split())


def test_help_shows_the_escape_of_a_renamed_class() -> None:
    words = CliRunner().invoke(app, ["reindex", "--help"]).output.replace("│", "").split()
    assert r"the old name is written \=." in " ".join(words)


def test_no_arguments_show_the_help() -> None:
    completed = CliRunner().invoke(app, [])
    assert "Continuously train and deploy" in completed.output
    assert "--install-completion" in completed.output


def test_interrupt_during_loading_is_one_line() -> None:
    script = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "evernear.cli.options":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from evernear.__main__ import main
main()
"""
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (completed.returncode, completed.stderr) == (130, "evernear: Interrupted before the command started.\n")
