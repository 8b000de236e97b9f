"""Free loopback ports for the servers that tests start."""

import itertools
import os
import random
import socket
import subprocess
import time

FIRST_PORT, PORTS_OF_A_WORKER, WORKERS = 16_000, 1000, 16
"""The ports below 32,768 are outside the range from which Linux and macOS choose ports for
connections and for servers on port 0. Such a port stays free until its server binds it, however
long the server takes to start."""
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
_ports = itertools.cycle(range(PORTS_OF_A_WORKER))
for _ in range(random.randrange(PORTS_OF_A_WORKER)):  # other test sessions may run on this machine
    next(_ports)


def loopback_ipv6() -> str | None:
    """The loopback address of IPv6; None on a machine without IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return None
    return "::1"


def free_ports(count: int) -> list[int]:
    """Ports that no process uses, and that only this function chooses."""
    free: list[int] = []
    while len(free) < count:
        port = FIRST_PORT + PORTS_OF_A_WORKER * _worker + next(_ports)
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        free.append(port)
    return free


def wait_for_port(port: int, process: subprocess.Popen[bytes], timeout_s: float = 60) -> None:
    """Wait until ``process`` listens on ``port``."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert process.poll() is None, "the server died"
            assert time.monotonic() < deadline, "the server is not listening"
            time.sleep(0.05)
