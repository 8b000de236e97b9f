"""Objects under keys, in a directory (``file:///path``) or in S3 (``s3://bucket/prefix``).

Writes are atomic. `Store.put_if` is a compare-and-swap, which moves pointers such as a dataset's
head or the champion, so that exactly one of two concurrent writers succeeds.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from evernear.common.store.base import ObjectInfo, Store
from evernear.common.store.files import FileStore
from evernear.errors import SettingsError

__all__ = ["FileStore", "ObjectInfo", "Store", "open_store"]


def open_store(uri: str) -> Store:
    """Open the store at ``file:///absolute/path`` or ``s3://bucket/prefix``.

    S3 is configured by the usual environment variables: ``AWS_ENDPOINT_URL_S3`` or
    ``AWS_ENDPOINT_URL`` (AWS by default), ``AWS_REGION`` (us-east-1 by default), ``AWS_CA_BUNDLE``
    for a private certificate authority, ``HTTP_PROXY``, ``HTTPS_PROXY`` and ``NO_PROXY``. Keys come
    from the first source that `evernear.common.store.credentials` finds. Without keys, requests are
    anonymous.

    Raises:
        SettingsError: the URI has another form, or an endpoint, key or proxy is invalid.
    """
    parts = urlsplit(uri)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return FileStore(Path(unquote(parts.path)))
    # The URI is not parsed as a URL, because '?' and '#' are ordinary characters in object names.
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    if parts.scheme == "s3" and bucket:
        from evernear.common.store.s3 import S3Store  # a directory store needs no S3 client

        return S3Store(bucket, prefix.strip("/"))
    raise SettingsError(f"The store {uri!r} is neither file:///absolute/path nor s3://bucket/prefix.")
