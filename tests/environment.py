"""The environment that every test, and every process that a test starts, begins with: not that of the user's shell.

Imported by conftest.py before anything that reads the environment. What is taken out here is put aside for the few
tests that need it: those that install packages, and those on a real cluster.
"""

import json
import os
import re

ASIDE = "EVERNEAR_TEST_SHELL"
"""An environment variable, since a worker of pytest-xdist inherits the environment of a process that cleaned it."""

_PROXIES = r"(all|ftp|http|https|no)_proxy"
_CERTIFICATES = r"ssl_cert_(file|dir)|(requests|curl)_ca_bundle"
_SERVICES = r"_?evernear_(?!test_).*|(aws|kfp|kf_pipelines|kubernetes|slack|minio|mc)_.*|kubeconfig"
_THREADS = r"(omp|gomp|kmp|mkl|openblas|goto)_.*"
_TERMINAL = r"(force|no)_color|columns|lines|tty_.*"
_FOREIGN = re.compile("|".join([_PROXIES, _CERTIFICATES, _SERVICES, _THREADS, _TERMINAL]), re.IGNORECASE)


def isolate() -> None:
    """Take out what the code under test reads, and let every process compute with one thread.

    Tests run side by side, and most of them wait for servers.
    """
    found = {name: os.environ.pop(name) for name in list(os.environ) if _FOREIGN.fullmatch(name)}
    os.environ.setdefault(ASIDE, json.dumps(found))
    os.environ["OMP_NUM_THREADS"] = "1"


def of_the_shell(*names: str) -> dict[str, str]:
    """The variables of ``names``, in any case, that the user's shell has set."""
    wanted = {name.lower() for name in names}
    aside: dict[str, str] = json.loads(os.environ[ASIDE])
    return {name: value for name, value in aside.items() if name.lower() in wanted}


isolate()
