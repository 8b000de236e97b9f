"""Objects under keys, in a directory (``file:///path``) or in S3 (``s3://bucket/prefix``).

A write is whole or not there, and `Store.put_if` is a compare-and-swap: pointers such as a dataset's head or
the champion move by it, so that of two writers exactly one wins. Keys are ``/``-separated words, as in S3.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from evernear.errors import SettingsError
from evernear.store.base import ObjectInfo, Store
from evernear.store.files import FileStore
from evernear.store.s3 import S3Store

__all__ = [
    "FileStore",
    "ObjectInfo",
    "S3Store",
    "Store",
    "open_store",
]


def open_store(uri: str) -> Store:
    """The store at ``file:///absolute/path`` or ``s3://bucket/prefix``.

    S3 is set up as other tools do it: ``AWS_ENDPOINT_URL`` (MinIO, SeaweedFS, ...; empty: AWS),
    ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_SESSION_TOKEN``, ``AWS_REGION`` (empty: us-east-1),
    ``AWS_CA_BUNDLE`` for a certificate authority of one's own, ``HTTP_PROXY``, ``HTTPS_PROXY`` and ``NO_PROXY``.
    Without keys requests are anonymous.

    Raises:
        SettingsError: the URI is neither, or the environment names an endpoint, keys or a proxy that cannot be.
    """
    parts = urlsplit(uri)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return FileStore(Path(unquote(parts.path)))
    # No URL: in the name of an object '?' and '#' are letters like others.
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    if parts.scheme == "s3" and bucket:
        return S3Store(bucket, prefix.strip("/"))
    raise SettingsError(f"The store {uri!r} is neither file:///absolute/path nor s3://bucket/prefix.")
