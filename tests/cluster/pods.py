"""Servers of the loopback cluster's pods, each with the pod's release from the object store."""

import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from evernear.common.store import open_store
from evernear.release.archive_reader import open_release
from evernear.release.registry import Registry
from evernear.serving.core import Predictor
from evernear.serving.responses import Rejection
from tests.loopback.kubernetes import PodBehavior, Ready

INFERENCE_PORT = 8080
_VERSION = "app.kubernetes.io/version"


class Pods:
    """One HTTP server per release, which responds like TorchServe and fetches the release on the
    first request."""

    def __init__(self, store: Callable[[], str], directory: Path) -> None:
        self._store, self._directory = store, directory
        self._releases: dict[str, _Release] = {}
        self._running = ExitStack()

    def behavior(self, pod: dict[str, Any]) -> PodBehavior:
        """Make the pod ready, with the release named by its label on the inference port."""
        version = pod["metadata"].get("labels", {}).get(_VERSION)
        if version is None:
            return Ready()
        if version not in self._releases:
            self._releases[version] = release = _Release(version, self._store(), self._directory / version)
            self._running.callback(release.stop)
        return Ready(serves={INFERENCE_PORT: self._releases[version].address})

    def stop(self) -> None:
        """End all servers."""
        self._running.close()


class _Release:
    """A server for one release on a free port."""

    def __init__(self, version: str, store: str, directory: Path) -> None:
        self._version, self._store, self._directory = version, store, directory
        self._loading = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self.answer))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        return ("127.0.0.1", self._server.server_port)

    @cached_property
    def _core(self) -> Predictor:
        self._directory.mkdir()
        archive = self._directory / "release.mar"
        Registry(open_store(self._store)).fetch(self._version, archive)
        return Predictor.open(open_release(archive, self._directory / "opened"))

    def answer(self, path: str, image: bytes) -> tuple[int, str]:
        """Status and body of ``/predictions/embedding[/VERSION]``."""
        if path not in ("/predictions/embedding", f"/predictions/embedding/{self._version}"):
            return 404, json.dumps({"code": 404, "type": "ModelVersionNotFoundException", "message": path})
        with self._loading:
            (answer,) = self._core.predict([image])
        return answer.code if isinstance(answer, Rejection) else 200, answer.model_dump_json()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(answer: Callable[[str, bytes], tuple[int, str]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, text = answer(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            return

    return Handler
