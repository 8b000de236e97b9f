"""A connection to S3: endpoint, keys, proxy, certificates, retries, error messages."""

import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote_plus, urljoin, urlsplit
from xml.etree import ElementTree
from xml.etree.ElementTree import ParseError
from xml.sax.saxutils import unescape

import certifi
import urllib3
from minio import Minio
from minio.error import InvalidResponseError, MinioException, S3Error
from minio.helpers import DictType

from evernear.common.environment import authorities, proxy_of, proxy_options, server_address
from evernear.common.output import root_cause
from evernear.common.store.credentials import KEY_NAMES, OVERLOADED, Keys, Profile, find_keys
from evernear.common.store.patience import patiently
from evernear.errors import SettingsError, StoreError, TransientStoreError

_T = TypeVar("_T")
MAX_ATTEMPTS = 4
BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 8.0
_PAGE_OBJECTS = 1000
_FOLDERS_AT_ONCE = 8
_PAGES_AT_ONCE = 4
_MARKUP = re.compile(r"<(style|script)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)
_NEXT_TOKEN = re.compile(rb"<NextContinuationToken>([^<]+)<")

# Codes for a missing object. A missing bucket is an error.
MISSING_OBJECT = frozenset({"NoSuchKey", "NoSuchObject"})

_BAD_KEYS = frozenset(
    {
        "AuthFailure",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
_ARCHIVED = "InvalidObjectState"  # also a 403
_CLOCK = "RequestTimeTooSkewed"
_DAMAGED = frozenset({"BadDigest", "IncompleteBody", "InvalidDigest", "XAmzContentSHA256Mismatch"})
_OTHER_REGION = frozenset(
    {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect", "TemporaryRedirect"}
)


class ListedObject(NamedTuple):
    name: str
    size_bytes: int
    etag: str
    modified: str
    """In ISO 8601 format."""


class _Page(NamedTuple):
    """``next_token`` is empty on the last page."""

    objects: list[ListedObject]
    folders: list[str]
    next_token: str


@dataclass(frozen=True)
class S3Connection:
    endpoint: str
    region: str
    http: urllib3.PoolManager
    client: Minio
    writer: Minio
    """For conditional writes: retries only requests that were certainly not executed."""
    credentials: Keys | None
    """None: requests are anonymous."""
    certificates: Path

    @classmethod
    def from_environment(cls) -> "S3Connection":
        """Read the variables that `evernear.common.store.open_store` lists."""
        profile = Profile.of()
        name, endpoint = endpoint_of(profile)
        parts = server_address(name, endpoint)
        region = (
            os.environ.get("AWS_REGION")
            or os.environ.get("AWS_DEFAULT_REGION")
            or profile.values.get("region")
            or "us-east-1"
        )
        certificates = _certificates()
        credentials = find_keys(certificates)
        http = pool(endpoint, certificates, _retries())
        minio = partial(Minio, parts.netloc, secure=parts.scheme == "https", region=region, credentials=credentials)
        try:
            client = minio(http_client=http)
            writer = minio(http_client=pool(endpoint, certificates, _retries(only_unexecuted=True)))
        except ValueError as error:
            raise SettingsError(f"S3 at {endpoint} cannot be used: {str(error).lower()}.") from None
        return cls(endpoint.rstrip("/"), region, http, client, writer, credentials, certificates)

    def put(self, bucket: str, name: str, data: bytes, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        """Send a PUT with conditional headers, which `Minio.put_object` does not support. Retried
        only if it was certainly not executed. After other failures, read the object back."""
        copied: DictType = {**headers}  # minio adds headers to this dict
        return self.writer._execute("PUT", bucket, name, body=data, headers=copied)  # pyright: ignore[reportPrivateUsage]

    def list(self, bucket: str, prefix: str) -> Iterator[ListedObject]:
        """Yield objects by prefix, in the server's order within a folder. If there is more than one
        page, several folders are listed concurrently, and their next pages are kept in memory. More
        than 1,000 folders are listed sequentially."""
        first = _parse_page(self._page(bucket, prefix))
        top = _parse_page(self._page(bucket, prefix, delimiter="/")) if first.next_token else first
        folders = [prefix] if top.next_token else top.folders
        if not top.next_token:
            yield from top.objects
        with ThreadPoolExecutor(_FOLDERS_AT_ONCE, "listing") as pool:
            waiting, listings = deque(folders), deque[tuple[str, Future[Sequence[bytes]]]]()
            while waiting or listings:
                while waiting and len(listings) < _FOLDERS_AT_ONCE:
                    listings.append((waiting[0], pool.submit(self._pages, bucket, waiting.popleft())))
                name, future = listings.popleft()
                # Pages are parsed in this thread, because others would hold the interpreter lock
                # and slow down the consumer.
                *earlier, last = future.result()
                last_page = _parse_page(last)
                if last_page.next_token:
                    listings.appendleft((name, pool.submit(self._pages, bucket, name, last_page.next_token)))
                for page in earlier:
                    yield from _parse_page(page).objects
                yield from last_page.objects

    def _pages(self, bucket: str, prefix: str, token: str = "") -> Sequence[bytes]:
        """Up to `_PAGES_AT_ONCE` consecutive pages, each requested once its token is known."""
        pages = [self._page(bucket, prefix, token)]
        while len(pages) < _PAGES_AT_ONCE and b"<IsTruncated>true<" in pages[-1]:
            match = _NEXT_TOKEN.search(pages[-1])
            if not match:
                break
            pages.append(self._page(bucket, prefix, unescape(match[1].decode())))
        return pages

    def _page(self, bucket: str, prefix: str, token: str = "", delimiter: str = "") -> bytes:
        """XML with at most 1,000 objects."""
        query: DictType = {"list-type": "2", "encoding-type": "url", "delimiter": delimiter, "prefix": prefix}
        query["max-keys"] = str(_PAGE_OBJECTS)
        if token:
            query["continuation-token"] = token

        def get() -> bytes:
            response = self.client._execute("GET", bucket, query_params={**query})  # pyright: ignore[reportPrivateUsage]
            return response.data

        return self.request(get, "s3:ListBucket", bucket, prefix)

    def children(self, bucket: str, prefix: str) -> Iterator[str]:
        """Yield the objects and folders directly below ``prefix``, a folder, by name."""
        token = ""
        while True:
            page = _parse_page(self._page(bucket, prefix, token, delimiter="/"))
            yield from [*(listed.name for listed in page.objects), *page.folders]
            token = page.next_token
            if not token:
                return

    def request(self, send: Callable[[], _T], permission: str, bucket: str, name: str = "") -> _T:
        """The result of ``send``, which is repeated in a step while the server is unreachable or
        overloaded. Errors are converted as in `errors`."""

        def once() -> _T:
            with self.errors(permission, bucket, name):
                return send()

        return patiently(once)

    @contextmanager
    def errors(self, permission: str, bucket: str, name: str = "") -> Generator[None]:
        """Convert client errors to `StoreError`, or `TransientStoreError` if the server is
        unreachable or overloaded. ``permission`` is the S3 action that the body needs."""
        location = f"s3://{bucket}/{name}".rstrip("/")
        try:
            yield
        except S3Error as error:
            transient = error.response.status in OVERLOADED or error.code in _DAMAGED
            kind = TransientStoreError if transient else StoreError
            sentence = self._explain(error, permission, bucket, location)
            raise kind(sentence, is_denied=_is_denied(error)) from error
        except InvalidResponseError as error:
            # Transient, because an ingress sends such responses while its backend is down.
            text = " ".join(_MARKUP.sub(" ", str(error)).split())[:160]
            raise TransientStoreError(
                f"{self.endpoint} does not behave like S3 ({text}); check {endpoint_name()}."
            ) from error
        except (MinioException, ParseError, ValueError, KeyError) as error:
            raise TransientStoreError(
                f"{self.endpoint} sent an invalid response about {location} ({error}); run again, or check"
                f" {endpoint_name()}."
            ) from error
        except urllib3.exceptions.MaxRetryError as error:
            raise TransientStoreError(self._explain_unreachable(error.reason or error)) from error
        except urllib3.exceptions.HTTPError as error:
            raise TransientStoreError(
                f"The transfer of {location} was interrupted ({root_cause(error)}); run again."
            ) from error

    def _explain_unreachable(self, reason: Exception) -> str:
        proxy = self.http.proxy
        if proxy and isinstance(reason, urllib3.exceptions.ProxyError):
            return (
                f"The proxy {proxy.scheme}://{proxy.netloc} (HTTP_PROXY, HTTPS_PROXY) to {self.endpoint} cannot be"
                f" reached: {root_cause(reason)}; correct it, or exempt the server with NO_PROXY."
            )
        if isinstance(reason, urllib3.exceptions.SSLError):
            if "CERTIFICATE" in str(reason).upper():
                return f"{self.endpoint} cannot be trusted: {root_cause(reason)}; AWS_CA_BUNDLE may name its authority."
            return (
                f"{self.endpoint} does not speak TLS ({root_cause(reason)}); if it is an HTTP port, use http:// in"
                f" {endpoint_name()}."
            )
        return f"{self.endpoint} cannot be reached: {root_cause(reason)}; check {endpoint_name()}."

    def _explain(self, error: S3Error, permission: str, bucket: str, location: str) -> str:
        code, status = error.code or "", error.response.status
        if code == "NoSuchBucket":
            return f"The bucket {bucket!r} does not exist at {self.endpoint}."
        if code in _BAD_KEYS:
            remedy = self.credentials.remedy if self.credentials else "set AWS_ACCESS_KEY_ID"
            return f"{self.endpoint} does not accept the keys ({code}); {remedy}."
        if code == _CLOCK:
            return f"{_clock_skew(error, self.endpoint)}; set this machine's clock (NTP)."
        if code in _OTHER_REGION:
            return f"The bucket {bucket!r} is not in the region {self.region} ({error.message}); set AWS_REGION."
        if code in _DAMAGED:
            return f"The upload of {location} was damaged in transit ({code}); nothing was stored, run again."
        if status in OVERLOADED:
            fault = f"is overloaded or broken ({status} {code}) after {MAX_ATTEMPTS} attempts"
            return f"{self.endpoint} {fault}; run again later."
        refused = f"{self.endpoint} refused {permission} on {location}: {(error.message or code).rstrip('.')}."
        if code == _ARCHIVED:
            return f"{refused} The object is archived (S3 Glacier); restore it and run again."
        if _is_denied(error):
            credentials = self._credentials_hint(permission)
            return f"{permission} on {location} is not permitted {credentials}; see docs/object-store.md."
        return refused

    def _credentials_hint(self, permission: str) -> str:
        if not self.credentials:
            return f"without keys; set {' and '.join(KEY_NAMES[:2])}, or give the process a role"
        # AWS returns 403 for a missing object if the user lacks s3:ListBucket.
        hint = " (or it is absent and s3:ListBucket not permitted)" if permission == "s3:GetObject" else ""
        source = self.credentials.source
        return "with these keys" + ("" if source in KEY_NAMES else f" of {source}") + hint


def _is_denied(error: S3Error) -> bool:
    code = error.code or ""
    return code == "AccessDenied" or (error.response.status == 403 and code not in {*_BAD_KEYS, _ARCHIVED, _CLOCK})


def endpoint_of(profile: Profile) -> tuple[str, str]:
    """What names the server, and its URL, in the order of AWS's tools."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if url := os.environ.get(name):
            return name, url
    url = profile.values.get("endpoint_url")
    if url and os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() != "true":
        return f"endpoint_url of the profile {profile.name}", url
    return "AWS_ENDPOINT_URL", "https://s3.amazonaws.com"


def endpoint_name() -> str:
    return endpoint_of(Profile.of())[0]


def _parse_page(data: bytes) -> _Page:
    """Parse a listing page in 8 ms of CPU time, where `Minio.list_objects` takes 60 ms."""
    page = ElementTree.fromstring(data)  # noqa: S314 - as minio does; expat limits expansion
    if not page.tag.endswith("ListBucketResult"):
        raise ValueError("the listing is another document")
    namespace = page.tag[: page.tag.rfind("}") + 1]
    decode = _unquote if page.findtext(f"{namespace}EncodingType") == "url" else str
    next_token = page.findtext(f"{namespace}NextContinuationToken", "")
    truncated = page.findtext(f"{namespace}IsTruncated") == "true"
    if truncated and not next_token:
        raise ValueError("a page without NextContinuationToken")
    return _Page(
        objects=[
            ListedObject(
                name=decode(item.findtext(f"{namespace}Key", "")),
                size_bytes=int(item.findtext(f"{namespace}Size", "")),
                # The ETag is optional in the protocol. Some gateways do not send it.
                etag=item.findtext(f"{namespace}ETag", "").strip('"') or item.findtext(f"{namespace}LastModified", ""),
                modified=item.findtext(f"{namespace}LastModified", ""),
            )
            for item in page.iterfind(f"{namespace}Contents")
        ],
        folders=[
            decode(item.findtext(f"{namespace}Prefix", "")) for item in page.iterfind(f"{namespace}CommonPrefixes")
        ],
        next_token=next_token if truncated else "",
    )


def _unquote(name: str) -> str:
    return unquote_plus(name) if "%" in name or "+" in name else name  # most names need no decoding


def _clock_skew(error: S3Error, endpoint: str) -> str:
    local_time, server_time = datetime.now(UTC), error.response.headers.get("date")
    difference = (
        f" by {abs(local_time - parsedate_to_datetime(server_time)).total_seconds():.0f} s" if server_time else ""
    )
    return f"The clocks of this machine and {endpoint} differ{difference}, too much for a signature"


def _retries(only_unexecuted: bool = False) -> urllib3.Retry:
    """The retry policy for idempotent requests, or with ``only_unexecuted`` for all others."""
    return urllib3.Retry(
        MAX_ATTEMPTS - 1,
        read=False if only_unexecuted else None,
        other=0 if only_unexecuted else None,
        status_forcelist=(429, 503) if only_unexecuted else OVERLOADED,
        allowed_methods=None,
        backoff_factor=BACKOFF_S,
        raise_on_status=False,
        # Retry-After may be hours, for which a step should rather fail and be run again.
        respect_retry_after_header=False,
    )


def _certificates() -> Path:
    for name in ("AWS_CA_BUNDLE", "SSL_CERT_FILE"):
        if path := os.environ.get(name):
            return authorities(name, Path(path))
    return Path(certifi.where())


def status_of(error: S3Error | InvalidResponseError) -> int:
    return error.response.status if isinstance(error, S3Error) else error._code  # pyright: ignore[reportPrivateUsage]


def required_etag(etag: str | None, endpoint: str) -> str:
    """The etag without quotes, or `StoreError` if the response has none."""
    if not etag:
        raise not_s3(endpoint, "success but no etag")
    return etag.strip('"')


CONNECT_TIMEOUT_S = 10.0
# Timeout between two packets, not for the whole transfer.
READ_TIMEOUT_S = 60.0
_OTHER_CONTENT = ("text/html", "application/xhtml", "application/json", "text/plain")
"""Content types that S3 returns only for objects, which also have an etag."""


def not_s3(endpoint: str, content: str) -> StoreError:
    """The error for a response that reports success but was not sent by S3."""
    return StoreError(
        f"{endpoint} does not behave like S3: it answers with {content}; check {endpoint_name()}, which may name a "
        "console or a login page."
    )


def _redirected(url: str, location: str) -> StoreError:
    """The error for a redirect, such as that of an ingress to HTTPS, or to a login page."""
    here, there = urlsplit(url), urlsplit(urljoin(url, location))
    server = f"{here.scheme}://{here.netloc}"
    if (here.scheme, here.netloc) == (there.scheme, there.netloc):
        return not_s3(server, f"a redirect to {there.path}")
    return StoreError(
        f"{server} redirects to {there.scheme}://{there.netloc}, and a signed request cannot follow; set"
        f" {endpoint_name()} to that server."
    )


class _OnlyS3:
    """Accepts no response of another server as an object, a listing or a successful write, and
    follows no redirect of a signed request, at whose end the signature would be missing."""

    def urlopen(self, method: str, url: str, *args: Any, **kwargs: Any) -> urllib3.BaseHTTPResponse:
        kwargs["redirect"] = "authorization" not in map(str.lower, kwargs.get("headers") or ())
        response: urllib3.BaseHTTPResponse = super().urlopen(method, url, *args, **kwargs)  # pyright: ignore
        kind = response.headers.get("content-type", "").lower()
        if (location := response.get_redirect_location()) and "xml" not in kind:
            response.release_conn()
            raise _redirected(url, location)
        if 200 <= response.status < 204 and kind.startswith(_OTHER_CONTENT) and "etag" not in response.headers:
            response.release_conn()
            content = "a web page" if "html" in kind else "content"
            server = urlsplit(url)
            raise not_s3(f"{server.scheme}://{server.netloc}", f"{content} of type {kind.partition(';')[0]}")
        return response


class _PoolManager(_OnlyS3, urllib3.PoolManager):
    pass


class _ProxyManager(_OnlyS3, urllib3.ProxyManager):
    pass


def pool(endpoint: str, certificates: Path, retries: urllib3.Retry) -> urllib3.PoolManager:
    proxy = proxy_of(endpoint)
    manager: Callable[..., urllib3.PoolManager] = (
        partial(_ProxyManager, **proxy_options(proxy)) if proxy else _PoolManager
    )
    return manager(
        maxsize=64,
        timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S),
        retries=retries,
        ca_certs=str(certificates),
    )
