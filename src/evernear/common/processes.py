"""The limits of this process's container, the threads of its libraries, and how processes end.

By default, the OpenMP runtimes of torch and FAISS start one thread per CPU of the node, and waiting
threads spin (docs/decisions/0013-what-a-pod-runs.md). They read their settings from the environment
when they are loaded, so importing evernear calls `configure_threads` first.
"""

import gc
import math
import os
import pkgutil
import re
import signal
import sys
import sysconfig
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path("/")
UNLIMITED_BYTES = 2**62
"""Without a limit, cgroup v1 reports the largest multiple of the page size, about 2**63 bytes."""


def cpu_limit(root: Path = ROOT) -> float:
    """The lowest CPU limit among this process's cgroups, or infinity. Version 2:
    https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files. Version 1:
    https://docs.kernel.org/scheduler/sched-bwc.html#management."""
    return min(map(_cpus, _cgroups(root, "cpu")), default=math.inf)


def memory_limit_bytes(root: Path = ROOT) -> float:
    """The lowest memory limit among this process's cgroups, or infinity. Version 2:
    https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files. Version 1:
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html."""
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


THREADS = "OMP_NUM_THREADS"
WAIT_POLICY = "OMP_WAIT_POLICY"
CHOSEN_THREADS = "_EVERNEAR_THREADS"
"""The value that `configure_threads` chose for `THREADS`, as distinct from a user's."""


def configure_threads() -> None:
    """Set `THREADS` and `WAIT_POLICY` for this process and its children, unless the user did.
    Libraries that are already loaded are not affected."""
    os.environ.setdefault(WAIT_POLICY, "PASSIVE")
    if THREADS not in os.environ:
        os.environ[THREADS] = os.environ[CHOSEN_THREADS] = str(available_cpus())


@contextmanager
def divide_between(processes: int) -> Generator[None]:
    """Divide the CPUs among ``processes`` processes that the context's body starts. A user's
    `THREADS` applies to each process, as with torchrun."""
    threads = os.environ.get(THREADS)
    if threads is None or threads != os.environ.get(CHOSEN_THREADS):
        yield
        return
    os.environ[THREADS] = str(max(1, available_cpus() // processes))
    try:
        yield
    finally:
        os.environ[THREADS] = threads


def chosen_threads() -> int:
    """The first number of `THREADS`, for libraries that do not read it."""
    first = os.environ.get(THREADS, "").partition(",")[0]
    return int(first) if first.isdecimal() and int(first) else available_cpus()


def available_cpus(root: Path = ROOT) -> int:
    """Number of CPUs that this process may use, from its affinity mask and the cgroup CPU limit. A
    limit of 1.5 CPUs counts as 2, because a single thread would leave a third of it unused."""
    # os.process_cpu_count (Python 3.13) considers only the affinity mask. joblib.cpu_count ignores
    # limits of parent cgroups, and takes 0.2 s to import.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return math.ceil(min(cpus, cpu_limit(root)))


LINE_MAX_CHARACTERS = 500
SHADOWED_SHOWN = 3
_SHELL_SIGNAL = 128
"""Offset of signal numbers in a shell's exit code."""
_STOPPED_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FRAME = re.compile(r"\s|note: run with |[-=~*#.]*$")
"""Lines that say nothing about a failure's cause: frames, Rust's backtrace note, separators."""


def exempt_loaded_objects() -> None:
    """Exempt all objects that exist now from garbage collection. To traverse those of torch takes
    up to 0.3 s, in which a server answers nothing."""
    gc.freeze()


def describe_ending(status: int, output: str, ran_out_of_memory: bool = False) -> str:
    """The end of a sentence about a failed process, such as "was killed by SIGKILL".

    ``status`` is a `subprocess.Popen.returncode` or a shell's exit code. Without a signal, the text
    quotes the last informative line of ``output``. ``ran_out_of_memory`` says whether the kernel
    killed a process of the same container for lack of memory.
    """
    number = -status if status < 0 else status - _SHELL_SIGNAL
    line = last_line(output)
    if number in set(signal.Signals):
        if number == signal.SIGKILL and ran_out_of_memory:
            return "ran out of memory: the kernel killed it (SIGKILL)."
        killed = f"was killed by {signal.Signals(number).name}"
        if number in _STOPPED_FROM_OUTSIDE:
            return f"{killed}, which another process or the kernel sent; `dmesg` shows whether memory ran out."
        return f"{killed}: {line}" if line else f"{killed}."
    if not line:
        return f"ended with exit status {status} and printed nothing."
    return f"ended with exit status {status}: {line}"


def last_line(output: str) -> str:
    lines = [line.rstrip() for line in output.splitlines() if not _FRAME.match(line)]
    line = lines[-1] if lines else ""
    return line if len(line) <= LINE_MAX_CHARACTERS else f"{line[:LINE_MAX_CHARACTERS]}..."


def shadowed_modules(python_path: str | None = None) -> str:
    """A sentence about modules on ``PYTHONPATH`` that hide installed ones, or an empty string.
    Python and all libraries import a user's ``random.py`` or ``faiss.py`` instead of the module
    that they need, and fail with misleading errors."""
    if python_path is None:
        python_path = os.environ.get("PYTHONPATH", "")
    directories = [directory for directory in python_path.split(os.pathsep) if directory]
    hidden = [_location(module) for module in pkgutil.iter_modules(directories) if _is_installed(module.name)]
    if not hidden:
        return ""
    more = f" and {len(hidden) - SHADOWED_SHOWN} more" if len(hidden) > SHADOWED_SHOWN else ""
    files = f"{', '.join(hidden[:SHADOWED_SHOWN])}{more}"
    return f"On PYTHONPATH, {files} hides the installed module of that name; rename it or unset PYTHONPATH."


def _location(module: pkgutil.ModuleInfo) -> str:
    directory = getattr(module.module_finder, "path", "")
    return os.path.join(directory, module.name if module.ispkg else f"{module.name}.py")  # noqa: PTH118 - a string


def _is_installed(name: str) -> bool:
    if name in sys.stdlib_module_names:
        return True
    paths = sysconfig.get_paths()
    return PathFinder.find_spec(name, [paths["purelib"], paths["platlib"]]) is not None
