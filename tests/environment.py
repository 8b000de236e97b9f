"""The initial environment of every test and its subprocesses, isolated from the user's shell, and
with temporary files in memory.

conftest.py imports this module before anything that reads the environment. The removed variables
are saved for the few tests that need them, which install packages or use a real cluster.
"""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

SHELL_VARIABLE = "EVERNEAR_TEST_SHELL"
"""An environment variable, because pytest-xdist workers inherit an environment that is already
isolated."""

MEMORY = Path("/dev/shm")
"""A file system in memory, on Linux."""
LEAST_MEMORY_BYTES = 8 * 2**30

NO_AWS = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull, "AWS_EC2_METADATA_DISABLED": "true"}
"""The user's profiles, and the role of the machine, are no keys for tests."""

_PROXIES = r"(all|ftp|http|https|no)_proxy"
_CERTIFICATES = r"ssl_cert_(file|dir)|(requests|curl)_ca_bundle"
_SERVICES = r"_?evernear_(?!test_).*|(aws|kfp|kf_pipelines|kubernetes|slack|minio|mc)_.*|kubeconfig"
_THREADS = r"(omp|gomp|kmp|mkl|openblas|goto)_.*"
_TERMINAL = r"(force|no)_color|columns|lines|tty_.*"
_BYTECODE = r"pythondontwritebytecode"  # without the cache, each process compiles the package and the tests again
_FOREIGN = re.compile("|".join([_PROXIES, _CERTIFICATES, _SERVICES, _THREADS, _TERMINAL, _BYTECODE]), re.IGNORECASE)


def isolate() -> None:
    """Remove the variables that the code under test reads, and limit every process to one
    thread.

    Tests run in parallel, and most of them wait for servers. Every process can be interrupted.
    """
    removed = {name: os.environ.pop(name) for name in list(os.environ) if _FOREIGN.fullmatch(name)}
    os.environ.setdefault(SHELL_VARIABLE, json.dumps(removed))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ |= NO_AWS
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > LEAST_MEMORY_BYTES:
        os.environ.setdefault("TMPDIR", str(MEMORY))  # tests write tens of thousands of small files
        tempfile.tempdir = None  # pytest has used the other one
    sys.dont_write_bytecode = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts a background job this way, and the commands under test would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def of_the_shell(*names: str) -> dict[str, str]:
    """Return the variables of ``names``, in upper or lower case, from the user's shell."""
    wanted = {name.lower() for name in names}
    removed: dict[str, str] = json.loads(os.environ[SHELL_VARIABLE])
    return {name: value for name, value in removed.items() if name.lower() in wanted}


isolate()
