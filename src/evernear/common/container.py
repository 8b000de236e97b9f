"""The CPU and memory limits of the container that this process runs in, as read from the cgroups of
the process."""

import math
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
"""The directory that contains ``proc`` and ``sys``."""
UNLIMITED_BYTES = 2**62
"""If no memory limit is set, cgroup v1 reports the largest multiple of the page size, about 2**63
bytes."""


def cpu_limit(root: Path = ROOT) -> float:
    """The lowest CPU limit among this process's cgroups, or infinity if no limit is set.

    See https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files for version 2, and
    https://docs.kernel.org/scheduler/sched-bwc.html#management for version 1.
    """
    return min(map(_cpus, _cgroups(root, "cpu")), default=math.inf)


def memory_limit_bytes(root: Path = ROOT) -> float:
    """The lowest memory limit among this process's cgroups, or infinity if no limit is set.

    See https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files for
    version 2, and https://docs.kernel.org/admin-guide/cgroup-v1/memory.html for version
    1.
    """
    return min(map(_memory_bytes, _cgroups(root, "memory")), default=math.inf)


def oom_kills(root: Path = ROOT) -> int:
    """Number of processes in this process's cgroups that the kernel has killed because memory ran
    out.

    Returns 0 if the kernel does not report the number. Version 2 reports the number in
    ``memory.events``, and version 1 reports it in ``memory.oom_control``.
    """
    return max(map(_oom_kills, _cgroups(root, "memory")), default=0)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The cgroup of this process and the parent cgroups, in each hierarchy in which ``controller``
    can set limits.

    If only the root of the hierarchy is visible, as in many containers, the root is the container's
    cgroup.
    """
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
