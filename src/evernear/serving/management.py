"""TorchServe's management API, in the words that a deployment uses."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests
from pydantic import Field

from evernear.errors import ServerUnreachableError, ServingError
from evernear.frozen import Frozen
from evernear.serving.connection import START_HINT, endpoints, read_key
from evernear.settings import ServingSettings

TIMEOUT_S = 30


class Worker(Frozen, extra="ignore"):
    """One Python process of a registered version."""

    status: str
    pid: int = 0


class _Queue(Frozen, extra="ignore"):
    pending: int = Field(alias="pendingRequests")


class Registered(Frozen, extra="ignore"):
    """One version of a model, as TorchServe knows it."""

    version: str = Field(alias="modelVersion")
    archive: str = Field(alias="modelUrl")
    workers: tuple[Worker, ...] = ()
    queue: _Queue = Field(alias="jobQueueStatus")

    @property
    def ready_workers(self) -> int:
        """How many workers have loaded the model."""
        return sum(worker.status == "READY" for worker in self.workers)


class Management:
    """A client of the management API of the server in ``home``.

    Every method raises `ServerUnreachableError` when no server answers and `ServingError` when it refuses.
    """

    def __init__(self, home: Path) -> None:
        self._home = home

    def list_models(self) -> list[str]:
        """Names of the registered models."""
        return [model["modelName"] for model in self._call("GET", "/models")["models"]]

    def versions(self, model: str) -> list[Registered]:
        """All registered versions of ``model``, oldest first; empty when it is not known."""
        if model not in self.list_models():
            return []
        found = [Registered.model_validate(entry) for entry in self._call("GET", f"/models/{model}/all")]
        return sorted(found, key=lambda registered: registered.version)

    def describe(self, model: str, version: str | None = None) -> Registered:
        """One version of ``model``; the default one unless named."""
        path = f"/models/{model}/{version}" if version else f"/models/{model}"
        return Registered.model_validate(self._call("GET", path)[0])

    def default_version(self, model: str) -> str | None:
        """The version that answers where none is named; None when ``model`` is not registered."""
        return self.describe(model).version if model in self.list_models() else None

    def register(self, archive: str, settings: ServingSettings) -> None:
        """Load ``archive``, a file name of the model store, and wait for its workers.

        How it is batched and how long it may take is told by the archive itself.
        """
        parameters = {
            "url": archive,
            "model_name": settings.model_name,
            "initial_workers": settings.workers,
            "synchronous": "true",
        }
        self._call("POST", "/models", parameters, timeout_s=settings.startup_timeout_s + TIMEOUT_S)

    def set_default(self, model: str, version: str) -> None:
        """Let ``version`` answer where none is named."""
        self._call("PUT", f"/models/{model}/{version}/set-default")

    def unregister(self, model: str, version: str) -> None:
        """Unload ``version`` and end its workers; TorchServe refuses this for the default of several."""
        self._call("DELETE", f"/models/{model}/{version}")

    def _call(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, Any] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Any:
        url = endpoints(self._home).management_url + path
        headers = {"Authorization": f"Bearer {read_key(self._home, 'management')}"}
        with requests.Session() as session:
            session.trust_env = False  # a proxy of the environment has no business on loopback
            try:
                response = session.request(method, url, params=parameters, headers=headers, timeout=timeout_s)
            except requests.ConnectionError:
                raise ServerUnreachableError(f"TorchServe does not answer at {url}; {START_HINT}.") from None
            except requests.Timeout:
                raise ServingError(f"TorchServe did not answer {method} {path} within {timeout_s} s.") from None
        if not response.ok:
            raise ServingError(f"TorchServe refused {method} {path}: {reason_of(response)}")
        return response.json()


def reason_of(response: requests.Response) -> str:
    """The sentence of an error response, or its status line where it holds none."""
    try:
        return str(response.json()["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.reason}."
