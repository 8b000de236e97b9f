"""Addresses, API keys and management API of the TorchServe server in a working directory.

`evernear.serving.torchserve` writes ``server.json`` when it starts a server. TorchServe writes
``key_file.json`` (mode 0600) to its working directory. Reading both suffices to use the server.
"""

import errno
import json
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import httpx
from pydantic import Field

from evernear.common.disk import reread
from evernear.common.frozen import Frozen
from evernear.errors import ServerUnreachableError, ServingError
from evernear.settings import ServingSettings
from evernear.settings.layers import default_workdir
from evernear.settings.serving import MODEL_NAME, STARTUP_TIMEOUT_S

STATE_FILE = "server.json"
KEY_FILE = "key_file.json"
OWNER_FILE = "owner.pid"


def home_of(workdir: Path) -> Path:
    """The TorchServe home directory: its configuration, keys, logs and model store."""
    return workdir.resolve() / "torchserve"


def start_hint(home: Path) -> str:
    bare = home == home_of(default_workdir())
    return "start it with `evernear serve`" + ("" if bare else f" and --workdir {shlex.quote(str(home.parent))}")


class Endpoints(Frozen):
    host: str
    inference_port: int
    management_port: int
    metrics_port: int
    grpc_inference_port: int
    grpc_management_port: int

    @staticmethod
    def of(settings: ServingSettings) -> "Endpoints":
        return Endpoints.model_validate(settings.model_dump(include=set(Endpoints.model_fields)))

    @property
    def inference_host(self) -> str:
        """The host at which a client on this machine reaches the inference API."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - compared, not bound

    @property
    def inference_url(self) -> str:
        return f"http://{host_and_port(self.inference_host, self.inference_port)}"

    @property
    def management_url(self) -> str:
        """The management API can load code, so it listens only on the loopback interface."""
        return f"http://127.0.0.1:{self.management_port}"


class ServerState(Frozen):
    remedy: ClassVar[str] = "delete it and run `evernear serve`"

    pid: int
    endpoints: Endpoints


def read_state(home: Path) -> ServerState | None:
    """The server that was started in ``home`` and not stopped. It may have crashed since."""
    try:
        data = (home / STATE_FILE).read_bytes()
    except FileNotFoundError:
        return None
    except PermissionError:
        raise _other_user_error(home) from None
    return ServerState.from_json(data, home / STATE_FILE)


def read_key(home: Path, api: Literal["inference", "management"]) -> str:
    """Read the bearer token of ``api``.

    Raises:
        ServerUnreachableError: no server is running in ``home``.
    """
    try:
        return str(_keys(home / KEY_FILE)[api]["key"])
    except FileNotFoundError:
        raise _not_running(home) from None
    except PermissionError:
        raise _other_user_error(home) from None
    except (ValueError, KeyError, TypeError):
        raise ServingError(f"{home / KEY_FILE} has no {api} key; run `evernear stop`, then `evernear serve`.") from None


@reread
def _keys(path: Path) -> Any:
    return json.loads(path.read_bytes())


def endpoints(home: Path) -> Endpoints:
    """Read the server's addresses.

    Raises:
        ServerUnreachableError: no server was started in ``home``.
    """
    state = read_state(home)
    if state is None:
        raise _not_running(home)
    return state.endpoints


def host_and_port(host: str, port: int) -> str:
    """``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def create_listener(host: str, port: int) -> socket.socket:
    """Port 0 selects any free port. The host ``::`` binds to all addresses, including IPv4 ones."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, dualstack_ipv6=both)


def listening_socket(host: str, port: int, setting: str) -> socket.socket:
    """Call `create_listener`, and convert an `OSError` with `bind_error`."""
    try:
        return create_listener(host, port)
    except OSError as error:
        raise bind_error(error, host, port, setting) from None


def bind_error(error: OSError, host: str, port: int, setting: str) -> ServingError:
    """The error for an address that cannot be bound. ``setting`` names the port's setting, or its
    option."""
    if error.errno == errno.EADDRINUSE:
        option = f"{setting} NUMBER" if setting.startswith("--") else f"--set {setting}=NUMBER"
        return ServingError(
            f"Port {port} on {host} is in use by another program; stop that, or choose a free port with {option}."
        )
    return ServingError(f"{setting}: {host_and_port(host, port)} cannot be bound: {error.strerror}.")


def _not_running(home: Path) -> ServerUnreachableError:
    return ServerUnreachableError(f"No TorchServe runs in {home}; {start_hint(home)}.")


def _other_user_error(home: Path) -> ServingError:
    return ServingError(f"The TorchServe in {home} belongs to another user; its keys cannot be read.")


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
