"""Slowdown of the steps on a busy machine: ``python benchmarks/contention.py``.

Each workload runs in a separate process. It is timed alone; next to a spinning process; the same with four times as
many requested threads as CPUs; and train next to probe, as the pipeline starts them. *After* is evernear unchanged.
*Before* is the same process with the OpenMP variables cleared and torch, FAISS and NumPy loaded first, so that the
settings of `evernear.threads` have no effect on them. Workloads are stopped after ``--limit-s``.

The conditions alternate, and the results are medians. If other processes use the machine, ``--nice -20`` (as root)
gives the workloads and the spinning processes nearly all CPU time while they are timed, a few seconds at a time.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import machine
import numpy as np
import psutil
from accuracy import ingest_dataset, settings_of

from evernear.data.shards import Dataset
from evernear.embedding.embed import embed
from evernear.embedding.export import export
from evernear.embedding.train import train_network
from evernear.evaluation.probe import probe
from evernear.index.faiss_compat import faiss
from evernear.settings import Settings
from evernear.threads import available_cpus

PAIR = ("train", "probe")
LABELS = {
    "train": "train: 60 steps",
    "probe": "probe: 60 steps, then as usual",
    "embed": "embed: 10,000 images",
    "search": "search: a flat index of 200,000 vectors, 32 queries at once",
}
STEPS, IMAGES = 60, 10_000
VECTORS, DIM, QUERIES, BATCHES = 200_000, 128, 32, 40
TIMES_THREADS = 4
CODE = {
    "after": "import evernear; import contention; contention.child()",
    "before": "import faiss, numpy, torch; import contention; contention.child()",
}
Workload = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="digits", help="a source of `evernear run`: digits or mnist:DIRECTORY")
    parser.add_argument("--workloads", nargs="+", choices=LABELS, default=list(LABELS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=8.0, help="time limit of a workload")
    parser.add_argument("--nice", type=int, default=0, help="nice value of the workloads while they are timed")
    arguments = parser.parse_args()

    machine_info = machine.describe()
    with tempfile.TemporaryDirectory() as scratch:
        dataset = ingest_dataset(arguments.source, Path(scratch))
        settings = one_epoch()
        train_network(dataset, settings.train, Path(scratch) / "trained")
        export(Path(scratch) / "trained", dataset, Path(scratch) / "network", settings.train.parity_tolerance)
        runner = WorkloadRunner(Path(scratch), arguments.limit_s, arguments.nice)
        for repeat in range(arguments.repeats):
            runner.repeat(arguments.workloads)
            print(f"repeat {repeat + 1}: {dict(runner.seconds)}", flush=True)
    workloads = {name: runner.ratios(name) for name in arguments.workloads}
    result = {"works": workloads, "pair": runner.pair_ratios() if set(PAIR) <= set(arguments.workloads) else {}}
    report = {
        **vars(arguments),
        "cpus_of_others": round(median(runner.cpus_of_others), 2),
        **result,
        "seconds": runner.seconds,
        "cpu_s": runner.cpu_s,
    }
    machine.write("contention", machine_info, without_infinity(report), table(result, arguments.limit_s))


class WorkloadRunner:
    """Runs the workloads and records the seconds and CPU seconds of each run; infinity if it was stopped."""

    def __init__(self, scratch: Path, limit_s: float, nice: int) -> None:
        self._scratch = scratch
        self._limit_s = limit_s
        self._nice = nice
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.cpu_s: dict[str, list[float]] = defaultdict(list)
        self.cpus_of_others: list[float] = []

    def repeat(self, workloads: Sequence[str]) -> None:
        threads = str(TIMES_THREADS * available_cpus())
        for name in workloads:
            for version in CODE:
                self._run(f"{name} {version} quiet", version, name)
            for version in CODE:
                self._run(f"{name} {version} busy", version, name, busy=True)
            self._run(f"{name} after busy, more threads", "after", name, busy=True, OMP_NUM_THREADS=threads)
        if set(PAIR) <= set(workloads):
            for version in CODE:
                self._run(f"pair {version}", version, *PAIR)

    def ratios(self, name: str) -> dict[str, float]:
        quiet_s = median(self.seconds[f"{name} after quiet"])
        return {
            "quiet_s": quiet_s,
            "before": median(self.seconds[f"{name} before busy"]) / quiet_s,
            "after": median(self.seconds[f"{name} after busy"]) / quiet_s,
            "after_with_more_threads": median(self.seconds[f"{name} after busy, more threads"]) / quiet_s,
            "quiet_before": median(self.seconds[f"{name} before quiet"]) / quiet_s,
            "cpu_s_before": median(self.cpu_s[f"{name} before busy"]),
            "cpu_s_after": median(self.cpu_s[f"{name} after busy"]),
        }

    def pair_ratios(self) -> dict[str, float]:
        alone_s = sum(median(self.seconds[f"{name} after quiet"]) for name in PAIR)
        return {version: median(self.seconds[f"pair {version}"]) / alone_s for version in CODE}

    def _run(self, key: str, version: str, *names: str, busy: bool = False, **variables: str) -> None:
        """Time concurrent workloads from the first start to the last end, without the time to load libraries."""
        environment = {n: v for n, v in os.environ.items() if not n.startswith(("OMP_", "GOMP_", "KMP_", "_EVERNEAR_"))}
        command = [sys.executable, "-c", CODE[version]]
        with ExitStack() as stack:
            workloads = [
                stack.enter_context(running_process([*command, name, str(self._scratch)], environment | variables))
                for name in names
            ]
            for workload in workloads:
                assert workload.stdout is not None
                workload.stdout.readline()  # the libraries are loaded
            if busy:
                stack.enter_context(running_process([sys.executable, "-c", "while True: pass"], environment))
            stack.enter_context(raised_priority(self._nice))
            before, started_s = own_and_all_cpu_s(), time.monotonic()
            duration_s = cpu_s = math.inf
            with suppress(subprocess.TimeoutExpired):
                starts, ends, cpus = zip(*start_together(workloads, self._limit_s), strict=True)
                duration_s, cpu_s = max(ends) - min(starts), sum(cpus)
            after, span_s = own_and_all_cpu_s(), time.monotonic() - started_s
        self.seconds[key].append(duration_s)
        self.cpu_s[key].append(cpu_s)
        self.cpus_of_others.append((after[1] - before[1] - (after[0] - before[0])) / span_s)


@contextmanager
def running_process(command: list[str], environment: dict[str, str]) -> Generator[subprocess.Popen[str]]:
    """Start a process and stop it on exit."""
    folder, pipe = Path(__file__).parent, subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, env=environment, text=True, stdin=pipe, stdout=pipe) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def raised_priority(nice: int) -> Generator[None]:
    """Raise the priority of this session. With autogroups, Linux applies nice values only within a session."""
    group = Path("/proc/self/autogroup")
    if not nice:
        yield
    elif group.exists():
        group.write_text(str(nice))
        try:
            yield
        finally:
            group.write_text("0")
    else:
        os.setpriority(os.PRIO_PGRP, 0, nice)
        try:
            yield
        finally:
            os.setpriority(os.PRIO_PGRP, 0, 0)


def start_together(workloads: Sequence[subprocess.Popen[str]], limit_s: float) -> list[tuple[float, ...]]:
    """Start the workloads together; return the start, end and CPU seconds that each reports.

    Raises:
        subprocess.TimeoutExpired: A workload takes longer than ``limit_s``.
    """
    for workload in workloads:
        assert workload.stdin is not None
        workload.stdin.write("go\n")
        workload.stdin.flush()
    deadline_s = time.monotonic() + limit_s
    return [
        tuple(map(float, workload.communicate(timeout=max(0.0, deadline_s - time.monotonic()))[0].split()))
        for workload in workloads
    ]


def own_and_all_cpu_s() -> tuple[float, float]:
    """CPU seconds of this process with all its children, and of the whole machine."""
    times, own = psutil.cpu_times(), psutil.Process()
    alive = [child.cpu_times() for child in own.children()]
    own_times = own.cpu_times()
    own_cpu_s = own_times.children_user + own_times.children_system
    own_cpu_s += sum(process.user + process.system for process in alive)
    return own_cpu_s, times.user + times.nice + times.system


def child() -> None:
    """Run one workload in this process; print its start and end on a shared clock, and its CPU seconds."""
    workloads = {"train": train_workload, "probe": probe_workload, "embed": embed_workload, "search": search_workload}
    workload = workloads[sys.argv[1]]
    with tempfile.TemporaryDirectory() as out:
        run = workload(Path(sys.argv[2]), Path(out))
        print("ready", flush=True)
        sys.stdin.readline()
        begin_s, begin_cpu_s = time.monotonic(), time.process_time()
        run()
        print(begin_s, time.monotonic(), time.process_time() - begin_cpu_s)


def train_workload(scratch: Path, out: Path) -> Workload:
    dataset, settings = Dataset.open(scratch), one_epoch()
    return lambda: train_network(dataset, settings.train, out)


def probe_workload(scratch: Path, _: Path) -> Workload:
    dataset, settings = Dataset.open(scratch), one_epoch()
    return lambda: probe(dataset, settings.train, settings.evaluation, settings.index)


def embed_workload(scratch: Path, out: Path) -> Workload:
    dataset = Dataset.open(scratch)
    times = math.ceil(IMAGES / dataset.count("train"))
    return lambda: [embed(scratch / "network", dataset, out, ("train",)) for _ in range(times)]


def search_workload(_: Path, __: Path) -> Workload:
    rng = np.random.default_rng(0)
    index = faiss.IndexFlatIP(DIM)
    for _ in range(10):
        index.add(rng.standard_normal((VECTORS // 10, DIM), dtype=np.float32))
    queries = rng.standard_normal((QUERIES, DIM), dtype=np.float32)
    return lambda: [index.search(queries, 5) for _ in range(BATCHES)]


def without_infinity(tree: Any) -> Any:
    """Replace infinity, which JSON lacks, by null; it marks a workload that was stopped."""
    if isinstance(tree, dict):
        return {name: without_infinity(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [without_infinity(value) for value in tree]
    return None if isinstance(tree, float) and math.isinf(tree) else tree


def one_epoch() -> Settings:
    return settings_of("default", "train.epochs=1", f"train.min_steps={STEPS}", "evaluation.probe_epochs=1")


def table(result: dict[str, Any], limit_s: float) -> list[list[str]]:
    heading = [
        "workload",
        "alone",
        "next to a spinning process: before",
        "after",
        f"after, {TIMES_THREADS} requested threads per CPU",
        "alone: before",
        "CPU seconds next to it: before",
        "after",
    ]
    rows = [
        [
            LABELS[name],
            f"{medians['quiet_s']:.1f} s",
            *(
                times(medians[key], limit_s / medians["quiet_s"])
                for key in ("before", "after", "after_with_more_threads", "quiet_before")
            ),
            *(seconds(medians[key]) for key in ("cpu_s_before", "cpu_s_after")),
        ]
        for name, medians in result["works"].items()
    ]
    if pair := result["pair"]:
        limit = limit_s / sum(result["works"][name]["quiet_s"] for name in PAIR)
        ratios = [times(pair[version], limit) for version in ("before", "after")]
        rows.append(["train next to probe, relative to the sum of both alone", "", *ratios, "", "", "", ""])
    return [heading, *rows]


def seconds(value: float) -> str:
    return "" if math.isinf(value) else f"{value:.1f} s"


def times(ratio: float, limit: float) -> str:
    return f"{ratio:.2f} times" if math.isfinite(ratio) else f"more than {limit:.1f} times"


if __name__ == "__main__":
    main()
