"""Limits of the container are read, and thread counts follow the CPU limit and reach every library.
Users can override them."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from evernear.common import processes as threads

GIB = 2**30
CPUS = len(os.sched_getaffinity(0))
ASK_THE_LIBRARIES = """
import json, os
import evernear
import faiss, numpy, scipy.linalg, torch
from threadpoolctl import threadpool_info
numpy.ones((8, 8)) @ numpy.ones((8, 8))
print(json.dumps({
    "torch": torch.get_num_threads(),
    "faiss": faiss.omp_get_max_threads(),
    "pools": [pool["num_threads"] for pool in threadpool_info()],
    "policy": os.environ["OMP_WAIT_POLICY"],
}))
"""
PRINT_THREADS = f"import os, evernear; print(os.environ[{threads.THREADS!r}])"


def run_isolated(code: str, prefix: tuple[str, ...] = (), **variables: str) -> str:
    """Return the output of ``code`` in a process whose only thread settings are ``variables``."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "_EVERNEAR_"))}
    command = [*prefix, sys.executable, "-c", code]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=True).stdout


def files(root: Path, cgroup: str, limits: dict[str, str]) -> Path:
    """Write the kernel's files of a process in ``cgroup`` below ``root``."""
    contents = {f"sys/fs/cgroup/{name}": limit for name, limit in limits.items()}
    for name, text in (contents | ({"proc/self/cgroup": cgroup} if cgroup else {})).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.fixture
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of 64 CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


@pytest.mark.usefixtures("many_cpus")
@pytest.mark.parametrize(
    ("cpus", "cgroup", "limits"),
    [
        pytest.param(64, "", {}, id="no cgroups"),
        pytest.param(64, "0::/", {}, id="v2, the machine itself"),
        pytest.param(64, "0::/", {"cpu.max": "max 100000"}, id="v2, no limit"),
        pytest.param(4, "0::/", {"cpu.max": "400000 100000"}, id="v2, a container"),
        pytest.param(2, "0::/", {"cpu.max": "150000 100000"}, id="1.5 CPUs are 2"),
        pytest.param(1, "0::/", {"cpu.max": "5000 100000"}, id="50m is 1"),
        pytest.param(
            3, "0::/pod/a", {"pod/cpu.max": "300000 100000", "pod/a/cpu.max": "max 100000"}, id="v2, a limit above"
        ),
        pytest.param(5, "0::/../../kubepods/pod", {"cpu.max": "500000 100000"}, id="v2, a path outside the container"),
        pytest.param(
            6, "12:memory:/docker/7\n4:cpu,cpuacct:/docker/7\n0::/docker/7",
            {"cpu/cpu.cfs_quota_us": "600000", "cpu/cpu.cfs_period_us": "100000", "memory/cpu.max": "100000 100000"},
            id="v1, a container",
        ),
        pytest.param(
            64, "1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, id="v1, no limit"
        ),
        pytest.param(64, "0::/", {"cpu.max": "?"}, id="an unreadable kernel file"),
    ],
)  # fmt: skip
def test_cpu_count_follows_the_limit(tmp_path: Path, cpus: int, cgroup: str, limits: dict[str, str]) -> None:
    assert threads.available_cpus(files(tmp_path, cgroup, limits)) == cpus


@pytest.mark.parametrize(
    ("limit_bytes", "cgroup", "limits"),
    [
        pytest.param(math.inf, "", {}, id="no cgroups"),
        pytest.param(math.inf, "0::/", {"memory.max": "max"}, id="v2, no limit"),
        pytest.param(GIB, "0::/", {"memory.max": f"{GIB}"}, id="v2, a container"),
        pytest.param(
            GIB, "0::/pod/a", {"pod/memory.max": f"{GIB}", "pod/a/memory.max": f"{2 * GIB}"}, id="v2, a limit above"
        ),
        pytest.param(
            GIB, "12:memory:/docker/7\n4:cpu,cpuacct:/docker/7",
            {"memory/memory.limit_in_bytes": f"{GIB}", "cpu/memory.limit_in_bytes": "1"},
            id="v1, a container",
        ),
        pytest.param(
            math.inf, "1:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, id="v1, no limit"
        ),
    ],
)  # fmt: skip
def test_memory_limit(tmp_path: Path, limit_bytes: float, cgroup: str, limits: dict[str, str]) -> None:
    assert threads.memory_limit_bytes(files(tmp_path, cgroup, limits)) == limit_bytes


def test_limit_above_the_cpu_count_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5})
    larger = files(tmp_path, "0::/", {"cpu.max": "800000 100000"})
    assert threads.available_cpus(larger) == 2


@pytest.mark.slow
def test_every_library_uses_one_thread_per_cpu_without_spinning() -> None:
    words = ("env", "OMP_DISPLAY_ENV=TRUE", "sh", "-c", 'exec "$@" 2>&1', "sh")
    output = run_isolated(ASK_THE_LIBRARIES, words)
    (answer,) = [line for line in output.splitlines() if line.startswith("{")]
    threads_of = json.loads(answer)
    assert threads_of["torch"] == threads_of["faiss"] == CPUS
    assert set(threads_of["pools"]) == {CPUS}
    assert threads_of["policy"] == "PASSIVE"
    assert output.count("OMP_WAIT_POLICY = 'PASSIVE'") == 2, "both OpenMP runtimes read it"


def test_user_variables_take_precedence() -> None:
    code = "import os, evernear, faiss; print(faiss.omp_get_max_threads(), os.environ['OMP_WAIT_POLICY'])"
    output = run_isolated(code, OMP_NUM_THREADS=str(CPUS + 1), OMP_WAIT_POLICY="ACTIVE")
    assert output == f"{CPUS + 1} ACTIVE\n"


def test_threads_follow_the_affinity() -> None:
    item = str(min(os.sched_getaffinity(0)))
    assert run_isolated(PRINT_THREADS, ("taskset", "--cpu-list", item)) == "1\n"


@pytest.fixture
def cgroup_of_one_cpu() -> Iterator[Path]:
    """A cgroup limited to one CPU."""
    v1, v2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    cgroup = (v1 if v1.is_dir() else v2) / f"evernear-test-{uuid4().hex[:8]}"
    try:
        cgroup.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be created here: {error.strerror}")
    try:
        try:
            if v1.is_dir():
                (cgroup / "cpu.cfs_quota_us").write_text("100000")
            else:
                (cgroup / "cpu.max").write_text("100000 100000")
        except OSError as error:
            pytest.skip(f"no CPU limit can be set here: {error.strerror}")
        yield cgroup
    finally:
        cgroup.rmdir()


@pytest.mark.skipif(CPUS == 1, reason="on one CPU a limit of one changes nothing")
def test_threads_follow_a_kernel_limit(cgroup_of_one_cpu: Path) -> None:
    join = ("sh", "-c", f'echo $$ > {cgroup_of_one_cpu}/cgroup.procs && exec "$@"', "sh")
    assert run_isolated(PRINT_THREADS, join) == "1\n"


@pytest.mark.parametrize(
    ("cpus", "training", "processes", "expected"),
    [(6, True, 2, "3"), (6, True, 4, "1"), (1, True, 2, "1"), (6, False, 2, "6")],
)
def test_training_processes_divide_the_cpus(
    monkeypatch: pytest.MonkeyPatch, cpus: int, training: bool, processes: int, expected: str
) -> None:
    monkeypatch.setattr(threads, "available_cpus", lambda: cpus)
    monkeypatch.setenv(threads.THREADS, str(cpus))
    monkeypatch.delenv(threads.CHOSEN_THREADS, raising=False)
    if training:
        monkeypatch.delenv(threads.THREADS)
        threads.configure_threads()
        monkeypatch.setenv(threads.CHOSEN_THREADS, os.environ[threads.CHOSEN_THREADS])  # restored after the test
    with threads.divide_between(processes):
        assert os.environ[threads.THREADS] == expected
    assert os.environ[threads.THREADS] == str(cpus)
