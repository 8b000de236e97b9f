"""DuckDB's memory: enough for each thread, and one sentence when it does not suffice."""

import math
from pathlib import Path

import pytest

from evernear.data import database
from evernear.data.database import Database
from evernear.errors import StoreError

MIB = 2**20


@pytest.mark.parametrize(
    ("cpus", "container_mib", "threads", "memory_mib"),
    [(64, math.inf, 4, 512), (2, math.inf, 2, 512), (64, 6144, 6, 768), (64, 2048, 2, 256), (8, 512, 1, 64)],
)
def test_each_thread_has_the_memory_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: int, container_mib: float, threads: int, memory_mib: int
) -> None:
    monkeypatch.setattr(database, "available_cpus", lambda: cpus)
    monkeypatch.setattr(database, "memory_limit_bytes", lambda: container_mib * MIB)
    db = Database(tmp_path)
    settings = db.row("SELECT current_setting('threads'), current_setting('memory_limit')")
    db.close()
    assert settings == (threads, f"{memory_mib}.0 MiB")


def test_lack_of_memory_while_rows_are_read_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "memory_limit_bytes", lambda: 32 * MIB)
    db = Database(tmp_path)
    rows = db.stream("SELECT md5(i::VARCHAR) AS a, md5(a) FROM range(300_000) t(i) ORDER BY a")
    with pytest.raises(StoreError, match="too little memory for the tables of the dataset") as raised:
        list(rows)
    db.close()
    assert "\n" not in str(raised.value)
