"""The commands of ``evernear watch``."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from evernear.cli.triggers import watch_app as app
from tests.real.triggers.watch.watched import noise


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    for number in range(30):
        path = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(noise(number))
    (tmp_path / "work").mkdir()
    return ["--workdir", str(tmp_path / "work")]


def run(*words: str) -> Result:
    return CliRunner(env=dict(os.environ)).invoke(app, list(words), catch_exceptions=False)


def test_once_shows_the_decision_and_changes_nothing(flags: list[str], tmp_path: Path) -> None:
    source = ["--source", f"folder:{tmp_path / 'images'}"]
    result = run("once", *flags, *source)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"retrain\n  - No release has been promoted yet, and {source[1]} has 30 images.\n")
    assert "listed files             30" in result.stdout
    assert not (tmp_path / "work" / "store").exists()
    report = json.loads(run("once", *flags, *source, "--json").stdout)
    assert (report["action"], report["figures"]["listed_files"], report["proposal"]) == ("retrain", 30, None)
    report = json.loads(run("once", *flags, *source, "--act", "--json").stdout)
    assert report["proposal"].startswith("000001-")
    assert "proposal" not in run("once", *flags, *source).stdout.splitlines()[-1]


def test_status_shows_the_schedule_and_the_last_check(flags: list[str], tmp_path: Path) -> None:
    assert "No check yet" in run("--status", *flags).stdout
    assert run("--off", *flags).stdout == "The watcher is off.\n"
    assert run("--status", *flags).stdout.startswith("off since ")
    assert run("--on", *flags).stdout == "The watcher is on.\n"
    run("once", *flags, "--source", f"folder:{tmp_path / 'images'}", "--act")
    report = json.loads(run("--status", *flags, "--json").stdout)
    assert report["on"]
    assert report["by"]
    assert report["last"]["action"] == "retrain"
    assert "  - No release has been promoted yet" in run("--status", *flags).stdout


def test_ship_once_ships_what_is_there_and_ends(flags: list[str], tmp_path: Path) -> None:
    queries = tmp_path / "work" / "torchserve" / "queries"
    empty = run("--ship", "--now", *flags).stdout
    assert empty.startswith("Shipped 0 files")
    assert "every 300 s if it is queried" in empty
    queries.mkdir(parents=True)
    (queries / "20270101T000000Z-v-host-1-x.jsonl").write_text("{}\n")
    store = (tmp_path / "work" / "store").as_uri()
    assert run("--ship", "--now", *flags).stdout == f"Shipped 1 file from {queries} to {store}.\n"
    assert not list(queries.iterdir())
    assert (tmp_path / "work" / "store" / "queries" / "20270101" / "20270101T000000Z-v-host-1-x.jsonl").exists()


def test_ship_says_that_it_runs(flags: list[str]) -> None:
    command = [sys.executable, "-c", "from evernear.cli.app import main; main()", "watch", "--ship", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shipper:
        assert shipper.stdout is not None
        line = shipper.stdout.readline()
        shipper.send_signal(signal.SIGTERM)
        assert shipper.wait(60) == 0
    assert line.startswith("Shipping the query log in ")
    assert "once a minute" in line
