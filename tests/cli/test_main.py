"""Options of the whole command line."""

from typer.testing import CliRunner

import evernear
from evernear.cli import app


def test_version_is_printed() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"evernear {evernear.__version__}\n")


def test_shells_complete_commands_and_options() -> None:
    def completed(words: str) -> set[str]:
        environment = {"_EVERNEAR_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return set(CliRunner().invoke(app, [], prog_name="evernear", env=environment).output.split())

    assert completed("evernear re") == {"registry", "reindex", "ready"}
    assert "--why" in completed("evernear registry promote --")


def test_no_arguments_show_the_help() -> None:
    done = CliRunner().invoke(app, [])
    assert "Continuously train and deploy" in done.output
    assert "--install-completion" in done.output
