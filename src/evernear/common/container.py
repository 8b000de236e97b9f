"""CPU and memory limits of the container that this process runs in, read from its cgroups."""

import math
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
UNLIMITED_BYTES = 2**62
"""Without a limit, cgroup v1 reports the largest multiple of the page size, about 2**63 bytes."""


def cpu_limit(root: Path = ROOT) -> float:
    """The lowest CPU limit among this process's cgroups, or infinity.

    Version 2: https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files. Version 1:
    https://docs.kernel.org/scheduler/sched-bwc.html#management.
    """
    return min(map(_cpus, _cgroups(root, "cpu")), default=math.inf)


def memory_limit_bytes(root: Path = ROOT) -> float:
    """The lowest memory limit among this process's cgroups, or infinity.

    Version 2: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files. Version 1:
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
    """
    return min(map(_memory_bytes, _cgroups(root, "memory")), default=math.inf)


def oom_kills(root: Path = ROOT) -> int:
    """Processes in this process's cgroups that the kernel killed for lack of memory, or 0."""
    return max(map(_oom_kills, _cgroups(root, "memory")), default=0)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """This process's cgroup and its parents, in each hierarchy in which ``controller`` sets limits.
    In many containers, only the hierarchy's root is visible, which is the container's cgroup."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()  # hierarchy:controllers:path, see cgroups(7)
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        cgroup = root / "sys/fs/cgroup" / (controller if controllers else "")
        yield cgroup
        for name in path.strip("/").split("/"):
            cgroup /= name
            yield cgroup


def _cpus(cgroup: Path) -> float:
    files = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    for names in files:
        try:
            quota_us, period_us = " ".join((cgroup / name).read_text() for name in names).split()
            return math.inf if quota_us in ("max", "-1") else int(quota_us) / int(period_us)
        except (OSError, ValueError):  # missing, or not in the expected format
            continue
    return math.inf


def _memory_bytes(cgroup: Path) -> float:
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            limit_bytes = int((cgroup / name).read_text())
        except (OSError, ValueError):  # missing, or "max"
            continue
        return limit_bytes if limit_bytes < UNLIMITED_BYTES else math.inf
    return math.inf


def _oom_kills(cgroup: Path) -> int:
    for name in ("memory.events", "memory.oom_control"):
        try:
            lines = (cgroup / name).read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        except (OSError, ValueError, IndexError, StopIteration):
            continue
    return 0
