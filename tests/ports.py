"""Free loopback ports for the servers that tests start."""

import socket
import subprocess
import time
from contextlib import ExitStack


def loopback_ipv6() -> str | None:
    """The loopback address of IPv6; None on a machine without IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return None
    return "::1"


def free_ports(count: int) -> list[int]:
    """Ports that no process uses at this moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


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
