"""`make audit` with a loopback OSV database: its queries, and its exit code for findings and
failures."""

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import ROOT


class Osv(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.queried: set[tuple[str, str]] = set()
        self.vulnerable: set[str] = set()
        self.down = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/query"


class _Handler(BaseHTTPRequestHandler):
    server: Osv

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert query["package"]["ecosystem"] == "PyPI"
        name = query["package"]["name"]
        self.server.queried.add((name, query["version"]))
        answer: dict[str, object] = {}
        if name in self.server.vulnerable:
            affected = {"package": {"name": name, "ecosystem": "PyPI"}, "ranges": []}
            answer = {"vulns": [{"id": "PYSEC-2026-1", "summary": "injected", "affected": [affected]}]}
        self.send_response(503 if self.server.down else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def osv() -> Iterator[Osv]:
    server = Osv()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def audit(osv: Osv, cache: Path) -> subprocess.CompletedProcess[str]:
    options = f"--vulnerability-service osv --osv-url {osv.url} --cache-dir {cache} --progress-spinner off"
    command = ["make", "--silent", "--old-file", ".venv/.installed", "audit", f"AUDIT={options}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def locked() -> set[tuple[str, str]]:
    """Names and versions of all packages that the locks install on this system."""
    locks = [ROOT / "requirements/main.lock", *ROOT.glob("tests/**/requirements-*.lock")]
    lines = [line for lock in locks for line in lock.read_text().splitlines() if re.match(r"[\w.-]+==", line)]
    requirements = [Requirement(line.rstrip(" \\")) for line in lines]
    return {(w.name, str(w.specifier)[2:]) for w in requirements if w.marker is None or w.marker.evaluate()}


@pytest.mark.slow
def test_audit_looks_up_every_locked_package(osv: Osv, tmp_path: Path) -> None:
    result = audit(osv, tmp_path)
    assert result.returncode == 0, result.stderr
    assert osv.queried == locked()


def test_audit_fails_for_a_vulnerable_package(osv: Osv, tmp_path: Path) -> None:
    osv.vulnerable.add("pillow")
    result = audit(osv, tmp_path)
    assert result.returncode != 0
    assert "PYSEC-2026-1" in result.stdout


def test_audit_fails_if_the_database_is_unavailable(osv: Osv, tmp_path: Path) -> None:
    osv.down = True
    assert audit(osv, tmp_path).returncode != 0
