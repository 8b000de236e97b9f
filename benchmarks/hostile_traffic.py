"""Latency of valid requests next to hostile ones:
``python benchmarks/hostile_traffic.py``.

Each server receives batches of concurrent requests: 8 valid ones with 8 generated bodies (hostile),
16 valid ones (quiet), and 8 valid ones (half). Blocks of these alternate, so other load affects all
of them. Every valid request must get the correct response, no response may be a 5xx, and no process
may die. The p99 of valid requests next to hostile ones is compared with batches of the same size
and, to account for smaller batches, of half the size. Then 15 valid requests are sent together with
one of the largest valid image files of each kind.

The servers are real processes on loopback: TorchServe, the preprocessing server in front of it, and
KServe's predictor.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import machine
from evernear.common.store import open_store
from evernear.release.registry import Registry
from evernear.serving.endpoints import read_key
from evernear.serving.torchserve import processes
from tests import hostile
from tests.hostile_requests import Answer, Request, RequestTarget, is_refusal, kserve, prep, torchserve, with_image
from tests.integrations.kserve.inference_service import Server
from tests.prep_server import make_champion
from tests.releases import PackedRelease, build_system, release_maker, settings_on_free_ports
from tests.served import Served, serving

VALID_REQUESTS = 8
BLOCK = 25
"""Consecutive batches of one kind."""
RATIO_TARGET = 2.0
Malformed = Callable[[random.Random], Request]


@dataclass
class Recorded:
    """Responses and the latencies of valid requests."""

    latencies_s: dict[str, list[float]] = field(default_factory=lambda: {"hostile": [], "quiet": [], "half": []})
    statuses: Counter[int] = field(default_factory=Counter[int])
    lost: int = 0
    errors: list[str] = field(default_factory=list[str])

    def percentile_ms(self, kind: str, quantile: float) -> float:
        ordered = sorted(self.latencies_s[kind])
        return round(1e3 * ordered[int(quantile * (len(ordered) - 1))], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=10_000, help="generated bodies for each server")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    machine_info, rows, heavy_rows = machine.describe(), [], []
    files = {name: make() for name, make in hostile.largest_valid_files(25_000_000).items()}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        numbers = iter(range(100))
        release = release_maker(build_system(scratch / "system"), lambda: new_directory(scratch, next(numbers)))()
        served = stack.enter_context(serving(release, scratch / "served"))
        for name, target, pids in targets(stack, served, release, scratch):
            rows.append({"server": name, **measure(target, pids, arguments)})
            print(rows[-1], flush=True)
            if name != "TorchServe, no forms":
                heavy_rows += [{"server": name, **entry} for entry in measure_largest_files(target, pids, files)]
    table = [
        [
            "server",
            "generated bodies",
            "4xx, 200 responses",
            "5xx or no response",
            "valid requests next to them",
            "lost or wrong",
            "terminated processes",
            "p50 / p99 of valid requests: hostile",
            "quiet",
            "half",
            "p99 relative to quiet, half",
            "peak memory",
        ]
    ] + [
        [
            row["server"],
            f"{row['bodies']:,}",
            f"{row['refused']:,}, {row['answered']:,}",
            str(row["failed"]),
            f"{row['good']:,}",
            str(row["lost"]),
            str(row["died"]),
            *(f"{row['p50_ms'][kind]} / {row['p99_ms'][kind]} ms" for kind in ("hostile", "quiet", "half")),
            f"**{row['p99_to_quiet']}**, {row['p99_to_half']}",
            f"{row['peak_bytes'] / 2**20:.0f} MiB",
        ]
        for row in rows
    ]
    heavy_table = [
        ["server", "file next to 15 valid requests", "status", "slowest valid response", "lost or wrong"]
    ] + [
        [row["server"], row["file"], str(row["status"]), f"{row['slowest_s']:.2f} s", str(row["lost"])]
        for row in heavy_rows
    ]
    machine.write(
        "hostile",
        "Valid requests next to hostile requests",
        machine_info,
        {"rows": rows, "heaviest": heavy_rows},
        table,
    )
    result = machine.RESULTS / "hostile.md"
    result.write_text(result.read_text() + "\n" + machine.markdown(heavy_table))
    print(machine.markdown(heavy_table))
    if any(row["failed"] or row["lost"] or row["died"] for row in rows) or any(row["lost"] for row in heavy_rows):
        sys.exit("A request was lost, a response was a 5xx, or a process died.")
    if any(row["p99_to_quiet"] > RATIO_TARGET for row in rows):
        sys.exit(f"A p99 ratio is above {RATIO_TARGET}.")


def new_directory(scratch: Path, number: int) -> Path:
    directory = scratch / f"release-{number}"
    directory.mkdir()
    return directory


def targets(
    stack: ExitStack, served: Served, release: PackedRelease, scratch: Path
) -> Iterator[tuple[str, RequestTarget, list[int]]]:
    """Yield name, target and processes of each server."""
    image, query = served.parts.smoke_queries()[0]
    token = read_key(served.home, "inference")
    running = [process.pid for process in processes(served.home)]
    target = torchserve(served.settings.serving.inference_port, token, image, query.pred)
    yield "TorchServe", target, running
    yield "TorchServe, no forms", replace(target, malformed=without_forms(target.malformed)), running
    port, pid = stack.enter_context(prep_process(served))
    yield "preprocessing server", prep(port, image, query.pred), [pid]
    predictor = Server(scratch / "kserve.log", "--model_dir", str(release.archive.parent))
    predictor.start()
    stack.callback(predictor.stop)
    predictor.await_answer("/")
    assert predictor.process is not None
    yield "KServe predictor", kserve(predictor.http_port, image, query.pred), [predictor.process.pid]


def without_forms(malformed: Malformed) -> Malformed:
    """Return only bodies that TorchServe's frontend forwards unchanged; it parses forms."""

    def make(rng: random.Random) -> Request:
        request = malformed(rng)
        while any(b"form" in value for _, value in request.headers):
            request = malformed(rng)
        return request

    return make


@contextmanager
def prep_process(served: Served) -> Iterator[tuple[int, int]]:
    """Start a preprocessing server in front of TorchServe; yield its port and process ID."""
    settings = served.settings
    Registry(open_store(settings.store_uri)).publish(served.home / "model-store" / "release.mar")
    make_champion(settings.store_uri, served.manifest.version)
    port = settings_on_free_ports().inference_port
    environment = os.environ | {"EVERNEAR_WORKDIR": str(settings.workdir), "EVERNEAR_PREP__PORT": str(port)}
    with subprocess.Popen([Path(sys.executable).parent / "evernear", "prep"], env=environment) as process:
        try:
            with httpx.Client(transport=httpx.HTTPTransport(retries=10), trust_env=False) as client:
                client.get(f"http://127.0.0.1:{port}/health", timeout=60).raise_for_status()
            yield port, process.pid
        finally:
            process.terminate()


def measure(target: RequestTarget, pids: list[int], arguments: argparse.Namespace) -> dict[str, Any]:
    """Send batches of all kinds until every body has been sent."""
    rng, recorded, sent = random.Random(arguments.seed), Recorded(), 0
    for _ in range(BLOCK):
        target.send([target.good] * VALID_REQUESTS)
    while sent < arguments.bodies:
        for kind, others in (("hostile", VALID_REQUESTS), ("quiet", VALID_REQUESTS), ("half", 0)):
            for _ in range(BLOCK):
                companions = (
                    [target.malformed(rng) for _ in range(others)] if kind == "hostile" else [target.good] * others
                )
                sent += len(companions) if kind == "hostile" else 0
                send(target, kind, companions, rng, recorded)
    for error in recorded.errors[:20]:
        print(error, flush=True)
    p50 = {kind: recorded.percentile_ms(kind, 0.50) for kind in recorded.latencies_s}
    p99 = {kind: recorded.percentile_ms(kind, 0.99) for kind in recorded.latencies_s}
    return {
        "bodies": sent,
        "refused": sum(count for status, count in recorded.statuses.items() if 400 <= status < 500),
        "answered": recorded.statuses[200],
        "failed": sum(count for status, count in recorded.statuses.items() if status == 0 or status >= 500),
        "good": len(recorded.latencies_s["hostile"]),
        "lost": recorded.lost,
        "died": sum(not psutil.pid_exists(pid) for pid in pids),
        "p50_ms": p50,
        "p99_ms": p99,
        "p99_to_quiet": round(p99["hostile"] / p99["quiet"], 2),
        "p99_to_half": round(p99["hostile"] / p99["half"], 2),
        "peak_bytes": peak_bytes(pids),
    }


def send(target: RequestTarget, kind: str, companions: list[Request], rng: random.Random, recorded: Recorded) -> None:
    batch = [(False, request) for request in companions] + [(True, target.good)] * VALID_REQUESTS
    rng.shuffle(batch)
    answers = target.send([request for _, request in batch])
    for (is_good, request), answer in zip(batch, answers, strict=True):
        if is_good:
            recorded.latencies_s[kind].append(answer.latency_s)
            if not target.is_right(answer):
                recorded.lost += 1
                recorded.errors.append(f"lost: {answer}")
        elif kind == "hostile":
            recorded.statuses[answer.status] += 1
            if not is_refusal(answer):
                recorded.errors.append(f"{answer} for {request.body[:100]!r} {request.headers}")


def measure_largest_files(target: RequestTarget, pids: list[int], files: dict[str, bytes]) -> Iterator[dict[str, Any]]:
    for name, image in files.items():
        request = with_image(target, image)
        if len(request.body) > 6_553_500:
            continue
        started_s = time.perf_counter()
        heavy, *good = target.send([request, *[target.good] * 15])
        yield {
            "file": name,
            "status": heavy.status,
            "slowest_s": round(max(answer.latency_s for answer in good), 3),
            "lost": sum(not target.is_right(answer) for answer in good) + (not _is_answer(heavy)),
            "died": sum(not psutil.pid_exists(pid) for pid in pids),
            "all_s": round(time.perf_counter() - started_s, 3),
            "peak_bytes": peak_bytes(pids),
        }


def _is_answer(answer: Answer) -> bool:
    return answer.status == 200


def peak_bytes(pids: list[int]) -> int:
    """Return the sum of the processes' high-water marks."""
    status = [Path(f"/proc/{pid}/status").read_text() for pid in pids if psutil.pid_exists(pid)]
    return sum(int(entry.partition("VmHWM:")[2].split()[0]) * 1024 for entry in status)


if __name__ == "__main__":
    main()
