"""Whose keys sign requests: the first source of AWS's usual chain that this process has.

`MinIO's providers`_ ask each source. This module chooses one, renews its keys before they expire,
masks them, and converts errors.

.. _MinIO's providers: https://github.com/minio/minio-py/blob/master/minio/credentials/providers.py
"""

import configparser
import ipaddress
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from xml.etree.ElementTree import ParseError

import urllib3
from minio.credentials.credentials import Credentials
from minio.credentials.providers import AWSConfigProvider, EnvAWSProvider, IamAwsProvider, Provider
from minio.error import ServerError

from evernear.common.environment import proxy_of, proxy_options, secret_file, server_address, server_parts, usable
from evernear.common.masking import remember
from evernear.common.output import root_cause
from evernear.errors import SettingsError, StoreError, TransientStoreError

if TYPE_CHECKING:
    from obstore.store import S3Credential

KEY_NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
CONTAINER_URI = "http://169.254.170.2"
"""Host of ``AWS_CONTAINER_CREDENTIALS_RELATIVE_URI``, of ECS."""
INSTANCE_URI = "http://169.254.169.254"
"""The metadata server of EC2."""
DMI = Path("/sys/class/dmi/id")
"""The directory in which Linux names the maker of the machine."""
INSTANCE_TIMEOUT_S = 1.0
RENEW_BEFORE = timedelta(minutes=5)
"""Keys are renewed this long before they expire, or when a fifth of their lifetime is left."""
TIMEOUT = urllib3.Timeout(connect=5, read=20)
_MACHINE_FILES = ("sys_vendor", "bios_vendor", "bios_version", "board_vendor", "chassis_vendor")
_CONTAINER_HOSTS = ("localhost", "169.254.170.2", "169.254.170.23", "fd00:ec2::23")
"""The hosts that AWS's tools ask for keys by plain HTTP, besides loopback addresses."""
_OTHER_WAYS = {"role_arn": "a role", "sso_session": "SSO", "sso_start_url": "SSO", "login_session": "a login"}
_CODE = re.compile(r'<Code>([\w.]{1,80})<|"(?:Code|code)"\s*:\s*"([\w.]{1,80})"')
OVERLOADED = (429, 500, 502, 503, 504)


class Keys(Provider):
    """The keys of one source, which ``make`` asks. Both S3 clients share them, in any number of
    threads."""

    def __init__(self, source: str, make: Callable[[], Provider], remedy: str) -> None:
        self.source = source
        """For the end of a sentence: "the web identity of the role ..."."""
        self.remedy = remedy
        self._make = make
        self._lock = threading.Lock()
        self._current: Credentials | None = None
        self._renew_at = datetime.min.replace(tzinfo=UTC)

    def retrieve(self) -> Credentials:
        """The keys, renewed if necessary. Keys without an expiration are read each time, because
        another program may have rewritten their file.

        Raises:
            TransientStoreError: the source is unreachable or overloaded, and the keys have expired.
            StoreError: the source refuses.
        """
        with self._lock:
            now = _now()
            if self._current is None or now >= self._renew_at:
                try:
                    self._renew(now)
                except TransientStoreError:
                    if self._current is None or _expiration(self._current) <= now:
                        raise
                    self._renew_at = now + timedelta(seconds=1)
            assert self._current is not None  # noqa: S101 - set by `_renew`
            return self._current

    def for_obstore(self) -> "S3Credential":
        """As obstore's callback returns them. obstore asks again at least every minute."""
        keys = self.retrieve()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.session_token,
            "expires_at": datetime.now(UTC) + timedelta(minutes=1),
        }

    def _renew(self, now: datetime) -> None:
        keys = self._ask()
        remember(keys.access_key, keys.secret_key, *filter(None, [keys.session_token]))
        left = _expiration(keys) - now
        self._current = keys
        self._renew_at = now + left - min(RENEW_BEFORE, left / 5) if keys.expiration else now

    def _ask(self) -> Credentials:
        try:
            return self._make().retrieve()
        except ServerError as error:
            kind = TransientStoreError if error.status_code in OVERLOADED else StoreError
            raise kind(f"There are no keys for {self.source}: {error}; {self.remedy}.") from None
        except urllib3.exceptions.HTTPError as error:
            raise TransientStoreError(f"The keys for {self.source} cannot be requested: {root_cause(error)}.") from None
        except (ValueError, KeyError, ParseError, configparser.Error, OSError) as error:
            # The error's text may quote the URL, which contains a token.
            raise StoreError(
                f"The keys for {self.source} cannot be read ({type(error).__name__}); {self.remedy}."
            ) from None


@dataclass(frozen=True)
class Profile:
    """A profile in AWS's shared files. ``values`` is empty if the files do not exist."""

    name: str
    values: Mapping[str, str]
    keys_in: tuple[Path, str] | None = None
    """The file with the keys, and the section."""

    @staticmethod
    def of(environment: Mapping[str, str] = os.environ) -> "Profile":
        name = environment.get("AWS_PROFILE") or "default"
        home = Path(environment.get("HOME") or "~").expanduser() / ".aws"
        config = Path(environment.get("AWS_CONFIG_FILE") or home / "config").expanduser()
        credentials = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials").expanduser()
        parsed = _parse(config)
        section = name if name == "default" and parsed.has_section(name) else f"profile {name}"
        values, secret = _section(parsed, section), _section(_parse(credentials), name)
        if not values and not secret and environment.get("AWS_PROFILE"):
            raise SettingsError(f"The profile {name!r} (AWS_PROFILE) is in neither {credentials} nor {config}.")
        services = _section(parsed, f"services {values.get('services', '')}")
        keys_in = (credentials, name) if "aws_access_key_id" in secret else (config, section)
        values = values | secret | _of_s3(services)
        return Profile(name, values, keys_in if values.get("aws_access_key_id") else None)

    def keys(self) -> Keys | None:
        """Raises `SettingsError` if the profile gets its keys in another way."""
        for setting, way in _OTHER_WAYS.items():
            if self.values.get(setting):
                raise self._needs(way, setting)
        if self.keys_in is None:
            if self.values.get("credential_process"):
                raise self._needs("a process", "credential_process")
            return None
        path, section = self.keys_in
        if not self.values.get("aws_secret_access_key"):
            raise SettingsError(
                f"The profile {self.name!r} in {path} has no aws_secret_access_key, which belongs to its "
                "aws_access_key_id; add it."
            )
        make = partial(AWSConfigProvider, str(path), section)
        return Keys(f"the profile {self.name!r} in {path}", make, f"correct {path}")

    def _needs(self, way: str, setting: str) -> SettingsError:
        return SettingsError(
            f"The profile {self.name!r} needs {way} ({setting}), which evernear does not support; run"
            f' eval "$(aws configure export-credentials --profile {self.name} --format env)" first, or name a profile'
            " with keys in AWS_PROFILE."
        )


def find_keys(certificates: Path) -> Keys | None:
    """The keys of the first source that this process has, or None for anonymous requests.

    Raises:
        SettingsError: a variable or a profile cannot be used.
    """
    keys = [usable(name) for name in KEY_NAMES]
    if keys[0]:
        found = Keys("AWS_ACCESS_KEY_ID", EnvAWSProvider, f"check {', '.join(KEY_NAMES[:2])} and {KEY_NAMES[2]}")
        if not keys[1]:
            raise SettingsError(
                "AWS_ACCESS_KEY_ID is set, so the secret key must not be empty; set AWS_SECRET_ACCESS_KEY."
            )
        return found
    if keys[1]:
        raise SettingsError("AWS_SECRET_ACCESS_KEY is set without AWS_ACCESS_KEY_ID; set both or neither.")
    # A process opens the store often, and must ask a metadata server once.
    relevant = {name: value for name, value in os.environ.items() if name.startswith("AWS_") or name == "HOME"}
    return _find_without_variables(tuple(sorted(relevant.items())), certificates)


@cache
def _find_without_variables(variables: tuple[tuple[str, str], ...], certificates: Path) -> Keys | None:
    environment = dict(variables)
    return (
        _web_identity(environment, certificates)
        or Profile.of(environment).keys()
        or _container(environment)
        or _instance(environment)
    )


def _web_identity(environment: Mapping[str, str], certificates: Path) -> Keys | None:
    file, role = environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"), environment.get("AWS_ROLE_ARN")
    if not file:
        return None
    if not role:
        raise SettingsError("AWS_WEB_IDENTITY_TOKEN_FILE is set without AWS_ROLE_ARN; set the role that it may assume.")
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    name = "AWS_ENDPOINT_URL_STS" if environment.get("AWS_ENDPOINT_URL_STS") else "AWS_ENDPOINT_URL"
    server = environment.get(name, "")
    host = server_address(name, server).hostname or "" if server else ""
    if name == "AWS_ENDPOINT_URL" and host.endswith("amazonaws.com"):
        server = ""  # S3's own address, which is not that of STS

    def make() -> Provider:
        secret_file("AWS_WEB_IDENTITY_TOKEN_FILE", Path(file))
        client = _client(server or "https://sts.amazonaws.com", certificates)
        return IamAwsProvider(custom_endpoint=server.rstrip("/") or None, http_client=client, region=region)

    remedy = "check the role's trust policy and the annotation eks.amazonaws.com/role-arn of the ServiceAccount"
    return Keys(f"the web identity of {role}", make, remedy)


def _container(environment: Mapping[str, str]) -> Keys | None:
    """ECS, and EKS Pod Identity."""
    relative = environment.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    uri = environment.get("AWS_CONTAINER_CREDENTIALS_FULL_URI") or ""
    if relative:
        uri = f"{CONTAINER_URI}/{relative.lstrip('/')}"
    elif not uri:
        return None
    elif not _may_send_token(uri):
        raise SettingsError(
            f"AWS_CONTAINER_CREDENTIALS_FULL_URI={uri!r} is neither https:// nor on this machine or at"
            f" {', '.join(_CONTAINER_HOSTS[1:])}, so a token is not sent to it."
        )

    def make() -> Provider:
        file = environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
        if file:
            secret_file("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", Path(file))
        return IamAwsProvider(custom_endpoint=uri, http_client=_client(uri, None))

    return Keys("the role of this container", make, "check its role (ECS task role, EKS Pod Identity association)")


def _instance(environment: Mapping[str, str]) -> Keys | None:
    """The role of an EC2 instance. The metadata server is asked here, because an instance may have
    no role, and may not answer containers."""
    if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    uri = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "").rstrip("/")
    if uri:
        server_address("AWS_EC2_METADATA_SERVICE_ENDPOINT", uri)
    if not uri and not environment.get("AWS_EXECUTION_ENV") and not _is_made_by_amazon():
        return None

    def make() -> Provider:
        client = _Direct(timeout=urllib3.Timeout(total=INSTANCE_TIMEOUT_S), retries=urllib3.Retry(0))
        return IamAwsProvider(custom_endpoint=uri or INSTANCE_URI, http_client=client)

    keys = Keys("the role of this EC2 instance", make, "check the role of the instance profile")
    try:
        keys.retrieve()
    except StoreError:
        return None
    return keys


def _is_made_by_amazon() -> bool:
    def text(file: Path) -> str:
        try:
            return file.read_text(errors="replace").lower()
        except OSError:
            return ""

    return any("amazon" in text(DMI / name) for name in _MACHINE_FILES)


def _may_send_token(uri: str) -> bool:
    parts = server_parts(uri)
    if parts is None:
        return False
    host = parts.hostname or ""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    return parts.scheme == "https" or (parts.scheme == "http" and (is_loopback or host in _CONTAINER_HOSTS))


def _now() -> datetime:
    return datetime.now(UTC)


def _expiration(keys: Credentials) -> datetime:
    return keys.expiration.replace(tzinfo=UTC) if keys.expiration else datetime.max.replace(tzinfo=UTC)


def _parse(path: Path) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read(path)
    except (configparser.Error, UnicodeDecodeError) as error:
        reason = " ".join(str(error).partition("\n")[0].split())
        raise SettingsError(f"{path} cannot be read ({reason}); correct it.") from None
    return parser


def _section(parsed: configparser.RawConfigParser, name: str) -> dict[str, str]:
    return dict(parsed[name]) if parsed.has_section(name) else {}


def _of_s3(services: Mapping[str, str]) -> dict[str, str]:
    """The settings of S3 in a section ``[services NAME]``, which are indented lines."""
    lines = (line.partition("=") for line in services.get("s3", "").splitlines())
    return {name.strip(): value.strip() for name, _, value in lines if name.strip() == "endpoint_url"}


class _Explained:
    """Raises `minio.error.ServerError` with the server's reason. MinIO's providers report only the
    status, in a sentence with the URL, which may contain a token."""

    def urlopen(self, method: str, url: str, *args: Any, **kwargs: Any) -> urllib3.BaseHTTPResponse:
        kwargs["redirect"] = False  # the request contains a token
        response: urllib3.BaseHTTPResponse = super().urlopen(method, url, *args, **kwargs)  # pyright: ignore
        if response.status >= 300:
            server, code = urlsplit(url), _CODE.search(response.data[:10_000].decode(errors="replace"))
            reason = f" {code[1] or code[2]}" if code else ""
            text = f"{server.scheme}://{server.netloc} answers {response.status}{reason}"
            raise ServerError(text, response.status)
        return response


class _Direct(_Explained, urllib3.PoolManager):
    pass


class _Proxied(_Explained, urllib3.ProxyManager):
    pass


def _client(server: str, certificates: Path | None) -> urllib3.PoolManager:
    """Without ``certificates``, the server is on this machine or link, and no proxy is used."""
    retries = urllib3.Retry(
        3,
        status_forcelist=OVERLOADED,
        allowed_methods=None,
        backoff_factor=0.2,
        raise_on_status=False,
        respect_retry_after_header=False,
    )
    options: dict[str, Any] = {"timeout": TIMEOUT, "retries": retries}
    if certificates is None:
        return _Direct(**options)
    proxy = proxy_of(server)
    options["ca_certs"] = str(certificates)
    return _Proxied(**proxy_options(proxy), **options) if proxy else _Direct(**options)
