"""Find the local run in progress, list run directories in start order, and delete old ones."""

import shutil
from datetime import UTC, datetime
from pathlib import Path

import psutil
from pydantic import AwareDatetime

from evernear.common.disk import write_atomically
from evernear.common.frozen import Frozen
from evernear.common.progress import read_events

DIRECTORY_FORMAT = "%Y%m%d-%H%M%S.%f"
"""Name of a run directory: the run's start time in UTC."""
ORDER_FILE = "run.order"
"""File in the working directory with the names of run directories, one per line, in start order."""


class RunProgress(Frozen):
    directory: str
    process: int
    started: AwareDatetime
    step: str = ""
    """The step that reported last. Empty before the first report."""
    message: str = ""

    def __str__(self) -> str:
        where = ": ".join(filter(None, [self.step, self.message])) or "starting"
        return f"{where} (since {self.started:%Y-%m-%d %H:%M:%S} UTC, process {self.process}, {self.directory})"


def progress(workdir: Path) -> RunProgress | None:
    try:
        process = int((workdir / "run.pid").read_text())
        # A process that started after the PID file was written has reused a killed run's ID.
        if psutil.Process(process).create_time() > (workdir / "run.pid").stat().st_mtime:
            return None
        directory = run_directories(workdir)[-1]
        started = datetime.strptime(directory.name, DIRECTORY_FORMAT).replace(tzinfo=UTC)
    except (OSError, ValueError, IndexError, psutil.NoSuchProcess):
        return None
    events, _ = read_events(directory / "events.jsonl")
    last = {"step": events[-1].step, "message": events[-1].message} if events else {}
    return RunProgress(directory=str(directory), process=process, started=started, **last)


def run_directories(workdir: Path) -> list[Path]:
    """The run directories in ``workdir``, in start order.

    `ORDER_FILE` has the order, because a clock may be set back. Unlisted directories are sorted by
    the time in their names, and those with a future time count as the oldest.

    Raises:
        OSError: ``workdir`` has no directory for runs.
    """
    try:
        listed = (workdir / ORDER_FILE).read_text().splitlines()
    except (OSError, ValueError):
        listed = []
    position = {name: number for number, name in enumerate(listed)}
    now = datetime.now(UTC)

    def age(directory: Path) -> tuple[int, bool, datetime]:
        started = _started(directory.name) or now
        return position.get(directory.name, -1), started <= now, started

    return sorted(filter(_is_run, (workdir.resolve() / "runs").iterdir()), key=age)


def prune_runs(workdir: Path, own: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` runs, and record the order of the others. ``own`` is the
    newest. The next run tries again to delete what this call could not."""
    earlier = [directory for directory in run_directories(workdir) if directory != own]
    surplus = max(0, len(earlier) + 1 - keep)
    for directory in earlier[:surplus]:
        shutil.rmtree(directory, ignore_errors=True)
    write_atomically(workdir / ORDER_FILE, "".join(f"{path.name}\n" for path in (*earlier[surplus:], own)))


def _is_run(path: Path) -> bool:
    """Whether `run_pipeline` created ``path``. Other directories are not deleted."""
    return _started(path.name) is not None and path.is_dir() and not path.is_symlink()


def _started(name: str) -> datetime | None:
    """The start time in a directory name, or None if it has another format."""
    try:
        return datetime.strptime(name, DIRECTORY_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        return None
