"""`evernear report`: the page of the last run, of a named one, and of two."""

import webbrowser
from pathlib import Path

import pytest

from evernear.common.run_record import RunRecord
from evernear.common.store import open_store
from evernear.reporting.notify import finalize
from tests import command_line

VERSION = "20261120.140501.1a2b3c4d"


@pytest.fixture
def workdir_with_runs(tmp_path: Path) -> Path:
    """A working directory with the pages of two runs and the records of two."""
    for time in ("20260101-000000.000000", "20260102-000000.000000"):
        (tmp_path / "runs" / time).mkdir(parents=True)
        (tmp_path / "runs" / time / "run.html").write_text(time)
    (tmp_path / "runs" / "20260103-000000.000000").mkdir()
    store = open_store((tmp_path / "store").as_uri())
    for run in ("r1", "r2"):
        record = RunRecord(store, run)
        record.save(archived={"version": VERSION} if run == "r2" else {})
        finalize(record, "continuous-training", "FAILED", f"The error of {run}.")
    return tmp_path


def report(workdir: Path, *names: str) -> str:
    result = command_line.evernear("report", *names, "--workdir", workdir)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_last_run_with_a_page_is_the_default(workdir_with_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    page = workdir_with_runs / "runs" / "20260102-000000.000000" / "run.html"
    assert report(workdir_with_runs) == str(page)
    assert opened == []
    assert report(workdir_with_runs, "--open") == str(page)
    assert opened == [page.as_uri()]


def test_named_run_or_release_is_written_from_its_record(workdir_with_runs: Path) -> None:
    assert "The error of r1." in Path(report(workdir_with_runs, "r1")).read_text()
    assert "The error of r2." in Path(report(workdir_with_runs, VERSION)).read_text()


def test_two_runs_are_compared_in_one_page(workdir_with_runs: Path) -> None:
    page = Path(report(workdir_with_runs, "r1", VERSION)).read_text()
    assert "The error of r1." in page
    assert "The error of r2." in page


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["absent"], "no outcome of a run absent"),
        (["20261120.140501.00000000"], "no record of the run that made release"),
        (["a", "b", "c"], "At most two runs"),
    ],
)
def test_unknown_or_too_many_names_are_errors(workdir_with_runs: Path, names: list[str], message: str) -> None:
    result = command_line.evernear("report", *names, "--workdir", workdir_with_runs)
    assert result.returncode != 0
    assert message in " ".join(result.stderr.split())


def test_no_run_is_an_error(tmp_path: Path) -> None:
    result = command_line.evernear("report", "--workdir", tmp_path)
    assert result.returncode != 0
    assert "has no run with a page" in " ".join(result.stderr.split())
