"""Connections to Milvus, and the alias of the champion's collection."""

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from evernear.common.environment import secret
from evernear.common.output import printable
from evernear.errors import SettingsError, StoreError, TransientStoreError
from evernear.index.description import Collection
from evernear.settings import IndexSettings
from evernear.settings.sources import MILVUS_TOKEN_VARIABLE, MILVUS_URI_VARIABLE

Client = Any
"""``pymilvus.MilvusClient``, whose methods are annotated as both synchronous and asynchronous."""
CONNECT_TIMEOUT_S = 30.0
TIMEOUT_S = 60.0
GRPC_OPTIONS = {"grpc.keepalive_permit_without_calls": False}
"""No pings on idle connections: Milvus Lite closes one on which pymilvus pings every 10 s."""
UNCONNECTED = 2
"""pymilvus' error code for a failed connection."""
MAX_MESSAGE = 300


def connect(uri: str) -> Client:
    """An address in the environment takes precedence over ``uri``."""
    os.environ.setdefault("PYTHON_DOTENV_DISABLED", "1")  # pymilvus would read .env files into the environment
    from pymilvus import MilvusClient

    for logger in ("pymilvus", "milvus_lite", "grpc._server"):  # they log the traceback of each raised error
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    with milvus_errors(uri):
        return MilvusClient(address(uri), token=_token(), timeout=CONNECT_TIMEOUT_S, grpc_options=GRPC_OPTIONS)


def uri_of(settings: IndexSettings) -> str:
    """The Milvus URI for a new collection. A path is made absolute."""
    uri = address(settings.uri)
    if not uri:
        raise SettingsError(
            "index.backend = milvus needs index.uri, the address of Milvus: http://HOST:19530, or a path that ends "
            "with .db for Milvus Lite."
        )
    return uri if urlsplit(uri).scheme else str(Path(uri).resolve())


def address(uri: str) -> str:
    """The Milvus address in the environment, or ``uri``."""
    return os.environ.get(MILVUS_URI_VARIABLE) or uri


def _token() -> str:
    """The token from the environment, or an empty string. It is sent only to the address in the
    environment, because a release could name someone else's server."""
    token = secret(MILVUS_TOKEN_VARIABLE)
    if token and not os.environ.get(MILVUS_URI_VARIABLE):
        raise SettingsError(
            f"A token for Milvus is set, but not {MILVUS_URI_VARIABLE}, the server that it is for; set it as well."
        )
    return token


@contextmanager
def milvus_errors(uri: str) -> Generator[None]:
    import grpc
    from pymilvus import MilvusException

    try:
        yield
    except (MilvusException, grpc.RpcError, grpc.FutureTimeoutError) as error:
        if is_transient(error):
            raise TransientStoreError(f"Milvus at {address(uri)} cannot be reached: {sentence(error)}.") from error
        raise StoreError(f"Milvus at {address(uri)} rejects the request: {sentence(error)}.") from error


def is_transient(error: Exception) -> bool:
    """Whether pymilvus raised ``error`` because the server is unreachable or overloaded."""
    import grpc
    from pymilvus.exceptions import ErrorCode, MilvusException

    if isinstance(error, grpc.Call):
        code = error.code()
    else:
        code = error.code if isinstance(error, MilvusException) else grpc.StatusCode.DEADLINE_EXCEEDED
    return code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, ErrorCode.RATE_LIMIT, UNCONNECTED)


def sentence(error: Exception) -> str:
    """The message of a pymilvus error, on one line and without its code."""
    text = str(getattr(error, "message", "") or getattr(error, "details", lambda: "")() or error)
    return printable(" ".join(text.split()).rstrip("."), MAX_MESSAGE)


def point_alias(collection: Collection) -> None:
    """Idempotent. Like `drop_alias` and `drop`, raises `StoreError` if Milvus rejects the request,
    or `TransientStoreError` if it is unreachable."""
    client = connect(collection.uri)
    with milvus_errors(collection.uri):
        if alias_target(client, collection) is None:
            client.create_alias(collection.name, collection.alias, timeout=TIMEOUT_S)
        else:
            client.alter_alias(collection.name, collection.alias, timeout=TIMEOUT_S)


def drop_alias(collection: Collection) -> None:
    client = connect(collection.uri)
    with milvus_errors(collection.uri):
        if alias_target(client, collection) is not None:
            client.drop_alias(collection.alias, timeout=TIMEOUT_S)


def drop(collection: Collection) -> None:
    client = connect(collection.uri)
    with milvus_errors(collection.uri):
        client.drop_collection(collection.name, timeout=TIMEOUT_S)


def alias_target(client: Client, collection: Collection) -> str | None:
    """The collection at which the alias of ``collection`` points, or None."""
    for name in client.list_collections(timeout=TIMEOUT_S):
        is_ours = name.startswith(f"{collection.alias}_")
        if is_ours and collection.alias in client.list_aliases(name, timeout=TIMEOUT_S)["aliases"]:
            return str(name)
    return None
