"""MinIO's ``ListenBucketNotification`` request, whose endless response contains a JSON line for
each change and whitespace in between.

The request is a MinIO extension. AWS and other servers do not support this request. For such
servers, the watcher checks only on its schedule. A dead connection is detected after
`evernear.common.store.s3_connection.READ_TIMEOUT_S` seconds without any data.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from minio.error import S3Error
from minio.helpers import BaseURL
from minio.signer import presign_v4

from evernear.common.store.s3_connection import S3Connection
from evernear.errors import SettingsError

EVENTS = ["s3:ObjectCreated:*", "s3:ObjectRemoved:*"]
EXPIRES_S = 60
"""Validity of the signature. The server checks the signature when it opens the stream."""


def listen(source: str, on_change: Callable[[], None]) -> None:
    """Call ``on_change`` when the stream opens, and at every later change of ``source``.

    Returns when the server ends the stream.

    Raises:
        SettingsError: the source is not a bucket, its server has no notifications, or the
            connection is not configured. A retry does not help.
        StoreError: the server is unreachable or rejects the request,
            or the connection broke.
    """
    parts = urlsplit(source)
    if parts.scheme != "s3":
        raise SettingsError(f"{source} has no notifications; it is checked on the schedule.")
    bucket, folder = parts.netloc, parts.path.strip("/")
    connection = S3Connection.from_environment()
    host = urlsplit(connection.endpoint).hostname or ""
    if host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        raise _unsupported(connection.endpoint)
    filters: dict[str, Any] = {"prefix": f"{folder}/" if folder else "", "suffix": "", "events": EVENTS}
    with connection.errors("s3:ListenBucketNotification", bucket, folder):
        # minio's `listen_bucket_notification` is not used, because it would repeat the request
        # immediately and forever after a stream ends.
        response = connection.http.request("GET", _url(connection, bucket, filters), preload_content=False)
        try:
            if response.status == 501:
                raise _unsupported(connection.endpoint)
            if response.status != 200:
                raise S3Error.fromxml(response)
            if "text/event-stream" not in response.headers.get("content-type", ""):
                raise _unsupported(connection.endpoint)  # other servers answer with a list of the bucket's objects
            on_change()
            for chunk in response.stream():
                if chunk.strip():
                    on_change()
        finally:
            response.close()


def _url(connection: S3Connection, bucket: str, query: dict[str, Any]) -> str:
    """A presigned URL, or a plain URL if no keys are configured."""
    region, keys = connection.region, connection.credentials.retrieve() if connection.credentials else None
    if keys and keys.session_token:
        query = query | {"X-Amz-Security-Token": keys.session_token}
    url = BaseURL(connection.endpoint, region).build(
        method="GET", region=region, bucket_name=bucket, query_params=query
    )
    if keys:
        now = datetime.now(UTC)
        url = presign_v4(method="GET", url=url, region=region, credentials=keys, date=now, expires=EXPIRES_S)
    return url.geturl()


def _unsupported(endpoint: str) -> SettingsError:
    return SettingsError(f"{endpoint} has no bucket notifications; the source is checked on schedule.")
