"""The console behind a real nginx, with its default Host and with the lines of docs/console.md."""

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from evernear.common.store import Store
from evernear.console.access import SignIn
from evernear.console.backend import Backend
from evernear.console.runs import LocalRuns
from evernear.console.server import create_console_app, create_server
from evernear.settings import load
from tests import ROOT
from tests.consoles import TOKEN
from tests.ports import free_ports
from tests.prep_server import running
from tests.review_queue import log_queries, png

NGINX = shutil.which("nginx")
pytestmark = pytest.mark.skipif(NGINX is None, reason="No nginx on the PATH; Debian's package is called nginx.")
(DOCUMENTED,) = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs/console.md").read_text(), re.DOTALL)
CONFIGURATION = """
daemon off; pid {here}/pid; error_log {here}/log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {here}/body; proxy_temp_path {here}/proxy;
    fastcgi_temp_path {here}/fastcgi; uwsgi_temp_path {here}/uwsgi; scgi_temp_path {here}/scgi;
    server {{ listen 127.0.0.1:{port}; location / {{ {lines} }} }}
}}
"""


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def nginx(lines: str, here: Path) -> Generator[str]:
    """Run nginx with ``lines`` in its only location, and yield its URL."""
    (port,) = free_ports(1)
    (here / "nginx.conf").write_text(CONFIGURATION.format(here=here, port=port, lines=lines))
    process = subprocess.Popen([str(NGINX), "-e", here / "log", "-c", here / "nginx.conf"])
    try:
        while not answers(port):
            assert process.poll() is None, (here / "log").read_text()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize(
    ("lines", "trusted", "status"),
    [
        ("proxy_pass http://127.0.0.1:8095;", "", 403),
        ("proxy_pass http://127.0.0.1:8095; proxy_set_header Host $host;", "", 403),  # without the port
        (DOCUMENTED, "", 200),
        ("proxy_pass http://127.0.0.1:8095; proxy_set_header X-Forwarded-Host $http_host;", '"127.0.0.1"', 200),
    ],
    ids=["default", "without the port", "documented", "forwarded"],
)
def test_action_through_nginx(
    store: Store, source: Path, tmp_path: Path, lines: str, trusted: str, status: int
) -> None:
    log_queries(store, png(1))
    overrides = [f"store={store.uri}", f"data.source=folder:{source}", f"console.trusted_proxies=[{trusted}]"]
    settings = load(overrides=overrides, environment={})
    app = create_console_app(Backend(settings, store, LocalRuns(settings, ())), SignIn(settings, TOKEN, "ann"))
    with (
        running(create_server(app, settings.console)) as port,
        nginx(lines.replace("8095", str(port)), tmp_path) as url,
        httpx.Client(base_url=url, follow_redirects=True, trust_env=False) as client,
    ):
        page = client.get(f"/review?token={TOKEN}").text
        csrf = re.findall(r'data-csrf="([^"]+)"', page)[0]
        form = {"image": re.findall(r'name="image" value="(\w+)"', page)[0], "action": "skip"}
        response = client.post("/review", data=form, headers={"Origin": url, "X-Evernear-CSRF": csrf})
        assert response.status_code == status, response.text
        if status == 403:
            assert f"The browser shows {url}, but" in response.text
            assert "proxy_set_header Host $http_host;" in response.text
        photograph = client.post("/try", content=bytes(20 * 2**20), headers={"Origin": url, "X-Evernear-CSRF": csrf})
        assert (photograph.status_code == 413) is (lines != DOCUMENTED), "nginx alone accepts 1 MiB"
