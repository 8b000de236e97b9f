from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from pydantic import Field

from evernear.common.frozen import Frozen
from evernear.errors import ServerUnreachableError, ServingError
from evernear.serving.endpoints import endpoints, read_key, start_hint
from evernear.settings import ServingSettings
from evernear.settings.serving import MODEL_NAME, STARTUP_TIMEOUT_S

TIMEOUT_S = 30


class ModelWorker(Frozen, extra="ignore"):
    """A Python worker process for a registered version."""

    status: str
    pid: int = 0


class _Queue(Frozen, extra="ignore"):
    pending: int = Field(alias="pendingRequests")


class RegisteredVersion(Frozen, extra="ignore"):
    version: str = Field(alias="modelVersion")
    archive: str = Field(alias="modelUrl")
    workers: tuple[ModelWorker, ...] = ()
    queue: _Queue = Field(alias="jobQueueStatus")

    @property
    def ready_workers(self) -> int:
        """Number of workers that have loaded the model."""
        return sum(worker.status == "READY" for worker in self.workers)


class Management:
    """TorchServe's management API in ``home``.

    Every method raises `ServerUnreachableError`, or `ServingError` if the call is rejected.
    """

    def __init__(self, home: Path) -> None:
        self._home = home

    def list_models(self) -> list[str]:
        return [model["modelName"] for model in self._call("GET", "/models")["models"]]

    def versions(self, model: str) -> list[RegisteredVersion]:
        """All registered versions, oldest first. Empty if the model is not registered."""
        if model not in self.list_models():
            return []
        versions = [RegisteredVersion.model_validate(entry) for entry in self._call("GET", f"/models/{model}/all")]
        return sorted(versions, key=lambda registered: registered.version)

    def describe(self, model: str, version: str | None = None) -> RegisteredVersion:
        """If ``version`` is None, describe the default one."""
        path = f"/models/{model}/{version}" if version else f"/models/{model}"
        return RegisteredVersion.model_validate(self._call("GET", path)[0])

    def register(self, archive: str, settings: ServingSettings) -> None:
        """Load the file ``archive`` from the model store, and wait for its workers. The archive's
        configuration sets batching and timeouts."""
        parameters = {
            "url": archive,
            "model_name": MODEL_NAME,
            "initial_workers": settings.workers,
            "synchronous": "true",
        }
        self._call("POST", "/models", parameters, timeout_s=STARTUP_TIMEOUT_S + TIMEOUT_S)

    def set_default(self, model: str, version: str) -> None:
        self._call("PUT", f"/models/{model}/{version}/set-default")

    def unregister(self, model: str, version: str) -> None:
        """Unload ``version`` and its workers, unless it is the default among several."""
        self._call("DELETE", f"/models/{model}/{version}")

    def _call(
        self, method: str, path: str, parameters: Mapping[str, Any] | None = None, timeout_s: float = TIMEOUT_S
    ) -> Any:
        url = endpoints(self._home).management_url + path
        headers = {"Authorization": f"Bearer {read_key(self._home, 'management')}"}
        try:
            # HTTP on the loopback interface needs neither certificates nor the proxy.
            with httpx.Client(headers=headers, timeout=timeout_s, trust_env=False, verify=False) as client:  # noqa: S501
                response = client.request(method, url, params=parameters)
        except (httpx.ReadTimeout, httpx.WriteTimeout):
            raise ServingError(f"TorchServe did not answer {method} {path} within {timeout_s} s.") from None
        except httpx.TransportError:
            raise ServerUnreachableError(f"TorchServe does not answer at {url}; {start_hint(self._home)}.") from None
        if not response.is_success:
            raise ServingError(f"TorchServe rejected {method} {path}: {_reason(response)}")
        return response.json()


def _reason(response: httpx.Response) -> str:
    """The message of an error response, or its status line without one."""
    try:
        return str(response.json()["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.reason_phrase}."
