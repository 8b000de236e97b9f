"""A bucket that tells of its changes: MinIO's ListenBucketNotification, a stream of JSON lines that does not end.

It is an extension of MinIO; AWS and others have none, and there the schedule alone decides. Between two events the
server sends blanks, so a connection that died is found after `evernear.store.s3_connection.READ_TIMEOUT_S`.
"""

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import urllib3
from minio import Minio

from evernear.errors import StoreError
from evernear.store.s3_connection import S3Connection

EVENTS = ("s3:ObjectCreated:*", "s3:ObjectRemoved:*")
_STREAM = "text/event-stream"


class Untold(StoreError):
    """The source does not tell of its changes, and will not when asked again."""


def listen(source: str, on_change: Callable[[], None]) -> None:
    """Call ``on_change`` when the stream stands (from then on nothing is missed), and at every change of ``source``.

    It returns when the server ends the stream.

    Raises:
        Untold: the source is no bucket, or its server knows no such stream.
        StoreError: the server cannot be reached or refuses, or the stream broke.
    """
    parts = urlsplit(source)
    if parts.scheme != "s3":
        raise Untold(f"{source} does not tell of its changes; it is looked at on the schedule.")
    bucket, prefix = parts.netloc, parts.path.strip("/")
    connection = S3Connection.from_environment()
    host = urlsplit(connection.endpoint)
    if (host.hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn")):
        raise _untold(connection.endpoint)
    stream = _Stream(connection.http, on_change, connection.endpoint)
    client = Minio(
        host.netloc,
        secure=host.scheme == "https",
        region=connection.region,
        credentials=connection.credentials,
        http_client=stream,
    )
    folder = f"{prefix}/" if prefix else ""
    with connection.errors("s3:ListenBucketNotification", bucket, prefix):
        try:
            with client.listen_bucket_notification(bucket, folder, events=EVENTS) as events:
                for _ in events:
                    on_change()
        except _Ended:
            return


class _Ended(Exception):
    """The client asks a second time, so the stream that it had is at its end."""


class _Stream(urllib3.PoolManager):
    """The client's way to the server for one stream: it would ask again at once and for ever when that ends."""

    def __init__(self, http: urllib3.PoolManager, on_open: Callable[[], None], endpoint: str) -> None:
        super().__init__()
        self._http = http
        self._on_open = on_open
        self._endpoint = endpoint
        self._opened = False

    def urlopen(self, method: str, url: str, redirect: bool = True, **request: Any) -> urllib3.BaseHTTPResponse:
        """Pass on the first request; a second one is the end."""
        if self._opened:
            raise _Ended
        self._opened = True
        answer = self._http.urlopen(method, url, redirect, **request)
        if answer.status == 200:
            # Servers that do not know the request answer it as another one, with a list of objects.
            if _STREAM not in answer.headers.get("content-type", ""):
                answer.close()
                raise _untold(self._endpoint)
            self._on_open()
        elif answer.status == 501:
            raise _untold(self._endpoint)
        return answer


def _untold(endpoint: str) -> Untold:
    return Untold(f"{endpoint} does not tell of changes in its buckets, as MinIO does; the schedule alone decides.")
