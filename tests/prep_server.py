"""A preprocessing server on a real port, and releases with chosen preprocessing."""

import base64
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx
import uvicorn

from evernear.common.store import open_store
from evernear.data.preprocess import Preprocessing
from evernear.release.manifest import ReleaseManifest
from evernear.release.promotions import CHAMPION, Promotion
from evernear.release.records import MANIFESTS, Decision, Record
from evernear.serving.endpoints import listening_socket
from evernear.serving.http.prep import create_prep_server
from evernear.settings import PrepSettings, ServingSettings, Settings


@contextmanager
def prep_client(settings: Settings) -> Iterator[httpx.Client]:
    """A client of a preprocessing server with ``settings``, on a free port."""
    with (
        running(create_prep_server(settings)) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client,
    ):
        yield client


@contextmanager
def running(server: uvicorn.Server) -> Iterator[int]:
    """Run a server in a thread, and yield its port."""
    with listening_socket("127.0.0.1", 0, "port") as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive()


def make_champion(store_uri: str, version: str) -> None:
    """Point the champion at ``version``, as a deployment does."""
    move = Promotion(version=version, previous=None, since=datetime.now(UTC))
    open_store(store_uri).put(CHAMPION, move.model_dump_json().encode())


@dataclass(frozen=True)
class ReleaseStore:
    """A registry of releases that differ only in their preprocessing."""

    directory: Path
    manifest: ReleaseManifest
    manifests: dict[str, ReleaseManifest] = field(default_factory=dict)
    """All releases by version, also those that are not in the registry."""

    def release(self, number: int, size_px: int = 8, *, published: bool = True, champion: bool = False) -> str:
        """The version of release ``number``, whose input is ``size_px`` wide."""
        version = f"20260101.00000{number}.0000000{number}"
        shape = Preprocessing(height_px=size_px, width_px=size_px, channels=1, mean=(0.5,), std=(0.5,))
        manifest = self.manifest.model_copy(update={"version": version, "preprocessing": shape})
        self.manifests[version] = manifest
        if published:
            record = Record(
                manifest=manifest,
                archive_sha256="0" * 64,
                archive_size_bytes=0,
                verdict=Decision(promote=True, reasons=()),
            )
            open_store(self.uri).put(f"{MANIFESTS}{version}.json", record.model_dump_json().encode())
        if champion:
            make_champion(self.uri, version)
        return version

    @property
    def uri(self) -> str:
        return self.directory.as_uri()

    def settings(self, predictor_port: int, **prep: object) -> Settings:
        return Settings(
            store=self.uri,
            serving=ServingSettings(grpc_inference_port=predictor_port),
            prep=PrepSettings.model_validate({"predictor_host": "127.0.0.1"} | prep),
        )


def encoded(image: bytes) -> dict[str, str]:
    return {"data": base64.b64encode(image).decode()}


def refusal(answer: httpx.Response, status: int) -> str:
    """The message of a rejected request."""
    assert answer.status_code == status, answer.text
    assert answer.json()["code"] == status
    assert answer.json()["message"].endswith(".")
    return answer.json()["message"]
