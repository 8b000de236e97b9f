"""Where the TorchServe of a working directory listens, and the keys that open it.

`evernear.serving.torchserve` writes ``server.json`` when it starts a server; TorchServe itself writes
``key_file.json`` (mode 0600) into its working directory. Whoever may read both may use the server.
"""

import json
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from evernear.errors import ServerUnreachableError, ServingError
from evernear.frozen import Frozen
from evernear.settings import ServingSettings

STATE_FILE = "server.json"
KEY_FILE = "key_file.json"
OWNER_FILE = "owner.pid"
START_HINT = "start it with `evernear serve`"


def home_of(workdir: Path) -> Path:
    """The directory in which the TorchServe of ``workdir`` runs: configuration, keys, logs, model store."""
    return workdir.resolve() / "torchserve"


class Endpoints(Frozen):
    """The addresses of one server."""

    host: str
    inference_port: int
    management_port: int
    metrics_port: int
    grpc_inference_port: int
    grpc_management_port: int

    @staticmethod
    def of(settings: ServingSettings) -> "Endpoints":
        """The addresses that ``settings`` ask for."""
        return Endpoints.model_validate(settings.model_dump(include=set(Endpoints.model_fields)))

    @property
    def inference_host(self) -> str:
        """The inference API's address, for a client on this machine."""
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host  # noqa: S104 - a server's bind, not ours

    @property
    def inference_url(self) -> str:
        """Base URL of the inference API, for a client on this machine."""
        return f"http://{self.inference_host}:{self.inference_port}"

    @property
    def management_url(self) -> str:
        """Base URL of the management API; it loads code, so it never leaves the machine."""
        return f"http://127.0.0.1:{self.management_port}"


class ServerState(Frozen):
    """What is remembered of a started server."""

    pid: int
    endpoints: Endpoints
    drain_timeout_s: int = 30


def read_state(home: Path) -> ServerState | None:
    """The server that was last started in ``home`` and not stopped since; it may have died."""
    try:
        return ServerState.model_validate_json((home / STATE_FILE).read_bytes())
    except FileNotFoundError:
        return None
    except PermissionError:
        raise _not_yours(home) from None
    except ValidationError:
        raise ServingError(f"{home / STATE_FILE} is damaged; delete it and run `evernear serve`.") from None


def read_key(home: Path, api: Literal["inference", "management"]) -> str:
    """The bearer token that ``api`` wants.

    Raises:
        ServerUnreachableError: no server runs in ``home``.
        ServingError: the keys belong to another user or cannot be understood.
    """
    try:
        return str(json.loads((home / KEY_FILE).read_bytes())[api]["key"])
    except FileNotFoundError:
        raise ServerUnreachableError(f"No TorchServe runs in {home}; {START_HINT}.") from None
    except PermissionError:
        raise _not_yours(home) from None
    except (ValueError, KeyError, TypeError):
        raise ServingError(
            f"{home / KEY_FILE} holds no {api} key; run `evernear stop`, then `evernear serve`."
        ) from None


def endpoints(home: Path) -> Endpoints:
    """Where the server of ``home`` listens.

    Raises:
        ServerUnreachableError: none was started.
    """
    state = read_state(home)
    if state is None:
        raise ServerUnreachableError(f"No TorchServe runs in {home}; {START_HINT}.")
    return state.endpoints


def _not_yours(home: Path) -> ServingError:
    return ServingError(f"The TorchServe in {home} belongs to another user; its keys cannot be read.")
