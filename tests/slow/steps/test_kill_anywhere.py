"""Kill a step and its processes at random moments and run it again: its result is the same each
time."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from evernear.data.manifest import save_manifest
from evernear.settings import DataSettings
from tests.dataset_images import write_images
from tests.real.embedding.conftest import digits, digits_dir, network_dir, trained_dir
from tests.small_ingest import ingest_small

__all__ = ["digits", "digits_dir", "network_dir", "trained_dir"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

KILLS = 20
# Each step has two processes, so that it and a part can be killed apart. Parts are slow, so that a
# kill meets one.
SLOW_PARTS = """
import sys, time
from functools import partial
from pathlib import Path
from evernear.common.parts import run_in_processes

def open_slowly(open_worker, *arguments):
    worker = open_worker(*arguments)
    def work(number, value):
        time.sleep(0.2)
        return worker(number, value)
    return work

def run_slowly(parts, open_worker, *arguments):
    print("planned", flush=True)
    run_in_processes(parts, partial(open_slowly, open_worker, *arguments), 2, lambda *_: None)
"""
INGEST = """
from evernear.data import ingest, parts
from evernear.data.parts import open_worker
from evernear.settings import DataSettings

def run(parts, _):
    run_slowly(parts, open_worker)

if __name__ == "__main__":
    directory, store = map(Path, sys.argv[1:])
    ingest.SHARD_SIZE_BYTES, parts.PART_NAMES = 2**16, 25
    settings = DataSettings(source=f"folder:{directory / 'images'}")
    digest = ingest.ingest_source(settings, store.as_uri(), run=run).digest
    assert not [path for path in store.rglob("parts/**/*") if path.is_file()]
    print(digest, flush=True)
"""
EMBED = """
from evernear.common.store import open_store
from evernear.data.shards import Dataset
from evernear.embedding.embed import combine_embeddings, open_here, plan_embedding

if __name__ == "__main__":
    directory, out = map(Path, sys.argv[1:])
    network, data, store = directory / "network", Dataset.open(directory / "dataset"), open_store(out.as_uri())
    parts = plan_embedding(network, data, store, "parts/run")
    run_slowly(parts, open_here, network, data, store, None)
    combine_embeddings(parts, network, data, out / "embeddings", store.uri)
    print((out / "embeddings/embeddings.json").read_text().replace("\\\\n", " "), flush=True)
"""
Prepare = Callable[[pytest.FixtureRequest, Path], None]


def write_twins(_: pytest.FixtureRequest, directory: Path) -> None:
    """Each image occurs twice, some of them under two labels."""
    write_images(directory / "images", 100)
    for number, image in enumerate(sorted((directory / "images").rglob("*.png"))):
        twin = directory / "images" / str(number % 3) / f"twin-{number}.png"
        twin.parent.mkdir(exist_ok=True)
        twin.write_bytes(image.read_bytes())


def prepare_embedding(request: pytest.FixtureRequest, directory: Path) -> None:
    settings = DataSettings(source="digits", gallery_fraction=0.5, query_fraction=0.2)
    save_manifest(ingest_small(settings, (directory / "store").as_uri()), directory / "dataset")
    (directory / "network").symlink_to(request.getfixturevalue("network_dir"))


def digest_of(output: str) -> str:
    """What must not change: the digest of a snapshot, or those of the shards of embeddings."""
    if not output.startswith("{"):
        return output
    shards = [shard["sha256"] for shard in json.loads(output)["shards"]]
    assert len(shards) >= 3
    return " ".join(shards)


@pytest.mark.parametrize(
    ("step", "prepare"), [(INGEST, write_twins), (EMBED, prepare_embedding)], ids=["ingest", "embed"]
)
def test_twenty_kills_at_random_moments_change_nothing(
    request: pytest.FixtureRequest, tmp_path: Path, step: str, prepare: Prepare
) -> None:
    script = tmp_path / "step.py"
    script.write_text(SLOW_PARTS + step)
    prepare(request, tmp_path)
    generator, digests, kills, elapsed_s = random.Random(0), list[str](), 0, 0.0
    out = tmp_path / "undisturbed"
    for attempt in range(10 * KILLS):
        started_s = time.monotonic()
        command = [sys.executable, str(script), str(tmp_path), str(out)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "planned\n"
            if digests and kills < KILLS:
                time.sleep(generator.uniform(0, elapsed_s))
                kills += kill(process, generator, of_a_part=attempt % 2 == 0)
            output, code = process.stdout.read(), process.wait()
        if code == 0:
            digests.append(digest_of(output.splitlines()[-1]))
            elapsed_s = elapsed_s or time.monotonic() - started_s
            if kills == KILLS:
                break
            out = tmp_path / f"out-{attempt}"
    assert kills == KILLS
    assert len(digests) > 1
    assert digests.count(digests[0]) == len(digests)


def kill(process: subprocess.Popen[str], generator: random.Random, *, of_a_part: bool) -> bool:
    """Kill the step or one of its processes; return whether one was there."""
    victims = [child.pid for child in psutil.Process(process.pid).children()] if of_a_part else [process.pid]
    if process.poll() is not None or not victims:
        return False
    os.kill(generator.choice(victims), signal.SIGKILL)
    return True
