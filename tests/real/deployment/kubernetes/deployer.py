"""The deployer's manifests, its settings, and the answers of the pods that it deploys."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evernear.release.archive_reader import open_release
from evernear.settings import Settings
from tests import ROOT
from tests.releases import PackedRelease

BASE = ROOT / "deploy" / "base"
IMAGE = "registry.example/evernear-serve@sha256:" + "a" * 64
MakeSettings = Callable[..., Settings]
Known = dict[bytes, dict[str, Any]]
"""Answers by image."""


def known_answers(release: PackedRelease, directory: Path) -> Known:
    """The answers of a release to its stored queries."""
    queries = open_release(release.archive, directory / release.version).smoke_queries()
    return {image: {"pred": query.pred, "dist": query.dist, "unknown": query.unknown} for image, query in queries}


class Answers:
    """Responses of a TorchServe with one release; ``wrong`` replaces some of their fields."""

    def __init__(self, version: str, known: Known) -> None:
        self.version, self.known = version, known
        self.wrong: dict[str, Any] = {}

    def answer(self, handler: Any) -> None:
        image = handler.rfile.read(int(handler.headers["Content-Length"]))
        requested = handler.path.removeprefix("/predictions/embedding").strip("/") or self.version
        if requested != self.version:
            response = {"code": 404, "type": "ModelVersionNotFoundException", "message": f"There is no {requested}."}
        elif self.known.get(image) is None:
            response = {"code": 400, "type": "BadImage", "message": "No image of this release."}
        else:
            response = self.known[image] | {"neighbors": [], "version": self.version} | self.wrong
        reply(handler, json.dumps(response), response.get("code", 200))


def reply(handler: Any, text: str, status: int = 200) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(text.encode())))
    handler.end_headers()
    handler.wfile.write(text.encode())
