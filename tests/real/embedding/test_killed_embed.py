"""Twenty kills of the embed step and of its processes, at random moments: the embeddings are the
same each time."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from evernear.data.manifest import save_manifest
from evernear.settings import DataSettings
from tests.small_ingest import ingest_small

KILLS = 20
# Two processes, so that the step and a part can be killed apart. Parts are slow, so that a kill
# meets one.
EMBED = """
import sys, time
from functools import partial
from pathlib import Path
from evernear.common.parts import Processes, run_parts
from evernear.common.store import open_store
from evernear.data.shards import Dataset
from evernear.embedding.embed import combine_embeddings, open_here, plan_embedding

def open_slowly(*arguments):
    worker = open_here(*arguments)
    def work(number, value):
        time.sleep(0.2)
        return worker(number, value)
    return work

if __name__ == "__main__":
    network, dataset, out = map(Path, sys.argv[1:4])
    data, store = Dataset.open(dataset), open_store(sys.argv[4])
    parts = plan_embedding(network, data, store, "parts/run", part_size_bytes=1)
    print("planned", flush=True)
    run_parts(parts, Processes(2, partial(open_slowly, network, data, store, None)), lambda *_: None)
    combine_embeddings(parts, network, data, out, store.uri)
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_kills_at_random_moments_change_nothing(network_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "embed.py"
    script.write_text(EMBED)
    store_uri = (tmp_path / "store").as_uri()
    settings = DataSettings(source="digits", gallery_fraction=0.5, query_fraction=0.2)
    save_manifest(ingest_small(settings, store_uri), tmp_path / "dataset")

    def start(results: Path, out: Path) -> subprocess.Popen[str]:
        command = [sys.executable, str(script), str(network_dir), str(tmp_path / "dataset"), str(out), results.as_uri()]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )

    generator, digests, kills, elapsed_s = random.Random(0), list[list[str]](), 0, 0.0
    results = tmp_path / "undisturbed"
    for attempt in range(10 * KILLS):
        out, started_s = results / "out", time.monotonic()
        with start(results, out) as step:
            assert step.stdout is not None
            assert step.stdout.readline() == "planned\n"
            if digests and kills < KILLS:
                time.sleep(generator.uniform(0, elapsed_s))
                victims = [step.pid] if attempt % 2 else [child.pid for child in psutil.Process(step.pid).children()]
                if step.poll() is None and victims:
                    os.kill(generator.choice(victims), signal.SIGKILL)
                    kills += 1
            code = step.wait()
        if code == 0:
            description = json.loads((out / "embeddings.json").read_bytes())
            digests.append([shard["sha256"] for shard in description["shards"]])
            elapsed_s = elapsed_s or time.monotonic() - started_s
            if kills == KILLS:
                break
            results = tmp_path / f"results-{attempt}"
    assert kills == KILLS
    assert len(digests) > 1
    assert digests.count(digests[0]) == len(digests)
    assert len(digests[0]) >= 3
