"""Make numerical libraries use one thread per CPU of the container, without busy waiting.

By default, the OpenMP runtimes of torch and FAISS start one thread per CPU of the node, and waiting
threads spin (docs/decisions/0013-what-a-pod-runs.md). They read their settings from the environment
when they are loaded, so importing evernear calls `configure_threads` first.
"""

import math
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from evernear.common.container import ROOT, cpu_limit

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


def available_cpus(root: Path = ROOT) -> int:
    """Number of CPUs that this process may use, from its affinity mask and the cgroup CPU limit. A
    limit of 1.5 CPUs counts as 2, because a single thread would leave a third of it unused."""
    # os.process_cpu_count (Python 3.13) considers only the affinity mask. joblib.cpu_count ignores
    # limits of parent cgroups, and takes 0.2 s to import.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return math.ceil(min(cpus, cpu_limit(root)))
