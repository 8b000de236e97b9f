"""The connection to the KFP API through ``kfp.Client``, with its errors as sentences."""

import ipaddress
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import kfp
import kfp_server_api
import urllib3
from kfp.client import KF_PIPELINES_SA_TOKEN_ENV, KF_PIPELINES_SA_TOKEN_PATH
from kfp.client.token_credentials_base import TokenCredentialsBase
from kfp_server_api.exceptions import ApiException

from evernear.common.environment import authorities, secret_file, usable
from evernear.common.output import root_cause
from evernear.common.retry import doubling, retry
from evernear.errors import PipelineServerError, SettingsError
from evernear.settings import PipelineSettings

TOKEN_VARIABLE = "KFP_TOKEN"  # noqa: S105 - a variable name, not a token
COOKIES_VARIABLE = "KFP_COOKIES"
IN_CLUSTER = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
TIMEOUT_S = 30.0
"""Of an API call. A request that starts a run waits for Argo's webhook."""
ATTEMPTS = 4
"""Over 3.5 s, in which a restarted API server answers again."""
BACKOFF_S = 0.5
BACKOFF_CAP_S = 8.0
PAGE_SIZE = 100
MAX_PAGES = 20
"""Pages to read from a list."""
CHECK_ENDPOINT = "check pipeline.endpoint"


class Connection:
    """A thread-safe connection to one KFP API with one identity."""

    def __init__(self, settings: PipelineSettings, environment: Mapping[str, str] = os.environ) -> None:
        self.settings = settings
        self.url = _endpoint(settings, environment)
        api_client = _client(settings, self.url, environment)
        services = (
            kfp_server_api.ExperimentServiceApi,
            kfp_server_api.PipelineServiceApi,
            kfp_server_api.PipelineUploadServiceApi,
            kfp_server_api.RecurringRunServiceApi,
            kfp_server_api.RunServiceApi,
        )
        self._services = [service(api_client) for service in services]

    @property
    def ui_url(self) -> str:
        """The KFP UI, or an empty string if only the API's cluster-internal address is known."""
        internal = _is_inside_cluster(urlsplit(self.url).hostname or "")
        return (self.settings.ui_url or ("" if internal else self.url)).rstrip("/")

    def call(self, operation: str, **arguments: Any) -> Any:
        """Call the operation named ``operation`` in KFP's Swagger file, without empty arguments.
        Failed requests are retried, those that create a resource only if they were never sent."""
        nonempty = {key: value for key, value in arguments.items() if value not in ("", None)}
        creates = "create" in operation or "upload" in operation

        def is_repeatable(error: Exception) -> bool:
            if isinstance(error, ApiException):
                return bool(error.status) and not creates and not _is_rejection(error)
            return _never_sent(error) or not creates

        try:
            return retry(
                lambda: self._call_once(operation, nonempty),
                on=(urllib3.exceptions.HTTPError, ApiException),
                when=is_repeatable,
                pauses_s=islice(doubling(BACKOFF_S, BACKOFF_CAP_S), ATTEMPTS - 1),
            )
        except urllib3.exceptions.HTTPError as error:
            status = 503 if _never_sent(error) else 0
            raise PipelineServerError(self._describe_connection_error(error), status) from None
        except ApiException as error:
            status = (error.status or 0) if _is_rejection(error) else 0
            if status == 404 and _is_foreign(error):  # not a missing resource
                status = 400
            raise PipelineServerError(self._describe_rejection(error), status) from None

    def find(self, operation: str, **arguments: Any) -> Any:
        """The result of `call`, or None if the resource does not exist."""
        try:
            return self.call(operation, **arguments)
        except PipelineServerError as error:
            if error.status != 404:
                raise
            return None

    def pages(self, operation: str, field: str, **arguments: Any) -> Iterator[Any]:
        """Yield the resources in ``field`` from up to `MAX_PAGES` pages of a list."""
        token = ""
        for _ in range(MAX_PAGES):
            page = self.call(operation, page_size=PAGE_SIZE, page_token=token, **arguments)
            yield from getattr(page, field) or ()
            token = page.next_page_token
            if not token:
                return

    def find_by_name(self, operation: str, field: str, name: str, **arguments: Any) -> list[Any]:
        """Those with exactly this display name. The API's own filter ignores case."""
        predicate = {"operation": "EQUALS", "key": "display_name", "string_value": name}
        # The API URL-decodes a filter twice. Unquoted, a + in a name would become a space.
        encoded = quote(json.dumps({"predicates": [predicate]}))
        matches = self.pages(operation, field, filter=encoded, **arguments)
        return [resource for resource in matches if resource.display_name == name]

    def _call_once(self, operation: str, arguments: Mapping[str, Any]) -> Any:
        method = next(getattr(s, f"{operation}_with_http_info") for s in self._services if hasattr(s, operation))
        try:
            # The timeout is a pair, because the generated client ignores a single float.
            response, _, headers = method(**arguments, _request_timeout=(TIMEOUT_S, TIMEOUT_S))
        except ValueError as error:
            raise PipelineServerError(f"{self.url} is not Kubeflow Pipelines 2 ({error}); {CHECK_ENDPOINT}.") from None
        # An authenticating proxy returns its login page with status 200, which kfp would parse as
        # an empty list.
        if not headers.get("Content-Type", "").startswith("application/json"):
            raise PipelineServerError(self._describe_login("returned a web page, probably a login page,"), 401)
        if response is None:
            raise PipelineServerError(f"{self.url} is not Kubeflow Pipelines 2 (it sent null); {CHECK_ENDPOINT}.")
        return response

    def _describe_login(self, answer: str) -> str:
        return (
            f"{self.url} {answer} instead of JSON: renew {COOKIES_VARIABLE} or {TOKEN_VARIABLE}, and check that "
            "pipeline.endpoint is the API's URL."
        )

    def _describe_connection_error(self, error: urllib3.exceptions.HTTPError) -> str:
        reason = getattr(error, "reason", None) or error
        match reason:
            case urllib3.exceptions.ResponseError():  # too many redirects
                return self._describe_login("redirected again and again, probably to a login page,")
            case urllib3.exceptions.SSLError() if "CERTIFICATE" not in str(reason).upper():
                hint = "if it is an HTTP port, use http:// in pipeline.endpoint"
                return f"{self.url} does not speak TLS ({root_cause(reason)}); {hint}."
            case urllib3.exceptions.SSLError():
                hint = "set pipeline.ca_file to its CA"
                return f"The certificate of {self.url} is not trusted ({root_cause(reason)}); {hint}."
            case urllib3.exceptions.TimeoutError() if not isinstance(reason, urllib3.exceptions.NewConnectionError):
                return f"Kubeflow Pipelines at {self.url} did not answer within {TIMEOUT_S:g} s."
            case _:
                hint = "check pipeline.endpoint and that the server is running"
                return f"Kubeflow Pipelines at {self.url} is unreachable ({root_cause(reason)}); {hint}."

    def _describe_rejection(self, error: ApiException) -> str:
        message = _message(error)
        if error.status == 404 and _is_foreign(error):
            return f"{self.url} is not Kubeflow Pipelines 2: it answered 404 ({message}); {CHECK_ENDPOINT}."
        match error.status:
            case 401:
                hint = f"set {TOKEN_VARIABLE} or {COOKIES_VARIABLE} to valid credentials"
                return f"Kubeflow Pipelines at {self.url} requires authentication: {hint}."
            case 403:
                hint = "check pipeline.namespace and your role in it"
                return f"Kubeflow Pipelines at {self.url} denied the request ({message}); {hint}."
            case 400 if "empty namespace" in message:
                return f"Kubeflow Pipelines at {self.url} is multi-user ({message}); set pipeline.namespace."
            case _:
                return f"Kubeflow Pipelines at {self.url} answered {error.status}: {message}."


def _endpoint(settings: PipelineSettings, environment: Mapping[str, str]) -> str:
    if settings.endpoint:
        url = settings.endpoint.rstrip("/")
    elif environment.get("KUBERNETES_SERVICE_HOST"):
        url = IN_CLUSTER
    else:
        raise SettingsError(
            "No Kubeflow Pipelines endpoint is configured: pass --endpoint, or set pipeline.endpoint, for example "
            "EVERNEAR_PIPELINE__ENDPOINT=http://localhost:8080 with a kubectl port-forward to ml-pipeline-ui."
        )
    parts = urlsplit(url)
    host = parts.hostname or ""
    mounted = _mounted_token(environment)
    variable = next((v for v in (TOKEN_VARIABLE, COOKIES_VARIABLE) if environment.get(v)), None)
    secret = f"The token {mounted}" if mounted else variable
    if secret and parts.scheme == "http" and not (_is_loopback(host) or _is_inside_cluster(host)):
        raise SettingsError(f"{secret} would be sent unencrypted to {host}; use an https:// URL for pipeline.endpoint.")
    return url


def _client(settings: PipelineSettings, url: str, environment: Mapping[str, str]) -> kfp_server_api.ApiClient:
    token, cookies = usable(TOKEN_VARIABLE, environment) or None, usable(COOKIES_VARIABLE, environment) or None
    mounted = _mounted_token(environment)
    if settings.ca_file is not None:
        authorities("pipeline.ca_file", settings.ca_file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # "only works with Kubeflow Pipeline v2.0.0-beta.2 and later"
        client = kfp.Client(
            host=url,
            # Without a namespace, kfp.Client's constructor asks for the server's mode in up to 5
            # attempts, 5 s apart. Each call sends the configured namespace instead.
            namespace=settings.namespace or "-",
            existing_token=token,
            cookies=cookies,
            credentials=_MountedToken(mounted) if mounted else None,
            ssl_ca_cert=str(settings.ca_file) if settings.ca_file else None,
        )
    # The generated API client inside kfp.Client supports timeouts and response headers, unlike
    # kfp.Client itself.
    api_client = client._run_api.api_client  # pyright: ignore[reportPrivateUsage]
    api_client.rest_client.pool_manager.connection_pool_kw["retries"] = urllib3.Retry(
        total=None, connect=0, read=0, other=0, redirect=5
    )
    return api_client


class _MountedToken(TokenCredentialsBase):
    """A pod's service account token, which the kubelet replaces. kfp's own class logs errors and
    goes on without a token."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def refresh_api_key_hook(self, config: Any) -> None:
        """Called for each request."""
        try:
            config.api_key["authorization"] = secret_file(KF_PIPELINES_SA_TOKEN_ENV, self._path)
        except SettingsError as error:  # it may be there again for the next request
            raise PipelineServerError(str(error)) from None


def _mounted_token(environment: Mapping[str, str]) -> Path | None:
    """The pod's service account token file, or None without it or if other credentials are set."""
    mounted = Path(environment.get(KF_PIPELINES_SA_TOKEN_ENV) or KF_PIPELINES_SA_TOKEN_PATH)
    overridden = environment.get(TOKEN_VARIABLE) or environment.get(COOKIES_VARIABLE)
    return mounted if not overridden and mounted.exists() else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_inside_cluster(host: str) -> bool:
    return host.endswith((".svc", ".svc.cluster.local"))


def _is_rejection(error: ApiException) -> bool:
    return 0 < (error.status or 0) < 500 and error.status != 429


def _is_foreign(error: ApiException) -> bool:
    """Whether the server of a 404 is not KFP, whose gateway says "Not Found" for an unknown path
    and names a missing resource."""
    try:
        body = json.loads(error.body or "")
    except ValueError:
        return True
    return not isinstance(body, dict) or "code" not in body or body.get("message") == "Not Found"


def _never_sent(error: Exception) -> bool:
    reason = getattr(error, "reason", None) or error
    return isinstance(reason, urllib3.exceptions.NewConnectionError | urllib3.exceptions.ConnectTimeoutError)


def _message(error: ApiException) -> str:
    """The message in the API's JSON response, in which uploads differ from other operations."""
    try:
        body = json.loads(error.body or "")
        message = str(body.get("message") or body.get("error_message") or "").strip()
    except (ValueError, AttributeError):
        message = ""
    message = message or str(error.reason or "no reason given")
    return message.splitlines()[0].rstrip(".")
