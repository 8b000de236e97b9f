"""Twenty kills of an ingest and of its processes, at random moments:
the snapshot is the same each time."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

KILLS = 20
# Two processes, so that the step and a part can be killed apart. Parts are slow, so that a kill
# meets one.
INGEST = """
import sys, time
from evernear.common.parts import Processes, run_parts
from evernear.data import ingest, plan
from evernear.data.decode_part import open_worker
from evernear.settings import DataSettings

def open_slowly(parts):
    worker = open_worker(parts)
    def work(number, value):
        time.sleep(0.2)
        return worker(number, value)
    return work

def run(parts, _):
    print("planned", flush=True)
    run_parts(parts, Processes(2, open_slowly), lambda *_: None)

if __name__ == "__main__":
    source, store = sys.argv[1:]
    ingest.SHARD_SIZE_BYTES, plan.PART_NAMES = 2**16, 25
    print(ingest.ingest_source(DataSettings(source=source), store, run=run).digest, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_kills_at_random_moments_change_nothing(make_image, tmp_path: Path) -> None:
    script, tree = tmp_path / "ingest.py", tmp_path / "tree"
    script.write_text(INGEST)
    for number in range(200):
        path = tree / str(number % 3) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_image(number // 2 * 2, (70, 70)))  # each image twice, some under two labels

    def start(store: Path) -> subprocess.Popen[str]:
        command = [sys.executable, str(script), f"folder:{tree}", store.as_uri()]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )

    generator, digests, kills, elapsed_s = random.Random(0), list[str](), 0, 0.0
    store = tmp_path / "undisturbed"
    for attempt in range(10 * KILLS):
        started_s = time.monotonic()
        with start(store) as step:
            assert step.stdout is not None
            assert step.stdout.readline() == "planned\n"
            if digests and kills < KILLS:
                time.sleep(generator.uniform(0, elapsed_s))
                victims = [step.pid] if attempt % 2 else [child.pid for child in psutil.Process(step.pid).children()]
                if step.poll() is None and victims:
                    os.kill(generator.choice(victims), signal.SIGKILL)
                    kills += 1
            lines, code = step.stdout.read().split(), step.wait()
        if code == 0:
            digests.append(lines[-1])
            elapsed_s = elapsed_s or time.monotonic() - started_s
            assert not [path for path in store.rglob("parts/**/*") if path.is_file()]
            if kills == KILLS:
                break
            store = tmp_path / f"store-{attempt}"
    assert kills == KILLS
    assert len(digests) > 1
    assert digests.count(digests[0]) == len(digests)
