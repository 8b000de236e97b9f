"""The KFP API through ``kfp.Client``: who asks, how often, and a sentence for everything that goes wrong."""

import ipaddress
import itertools
import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import kfp
import kfp_server_api
import urllib3
from kfp.client import KF_PIPELINES_SA_TOKEN_ENV, KF_PIPELINES_SA_TOKEN_PATH, ServiceAccountTokenVolumeCredentials
from kfp_server_api.exceptions import ApiException

from evernear.errors import PipelineServerError, SettingsError
from evernear.settings import PipelineSettings

TOKEN_VARIABLE = "KFP_TOKEN"  # noqa: S105 - a name, no token
COOKIES_VARIABLE = "KFP_COOKIES"
IN_CLUSTER = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
BACKOFF_S = 0.5
BACKOFF_CAP_S = 8.0
PAGE_SIZE = 100
PAGES = 20
"""At most so many are read of any list: 2,000 runs say more than enough."""


class Refused(PipelineServerError):
    """The API understood and said no; ``status`` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Connection:
    """One KFP API, as one caller. May be shared by threads.

    Raises:
        SettingsError: there is no endpoint, or a secret would travel in the clear.
    """

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
        """Where people look at runs; empty where only the API's address inside the cluster is known."""
        inside = _is_inside_cluster(urlsplit(self.url).hostname or "")
        return (self.settings.ui_url or ("" if inside else self.url)).rstrip("/")

    def ask(self, operation: str, **arguments: Any) -> Any:
        """Call ``operation``, by its name in the API's swagger; empty arguments are left out.

        What creates something is sent once, unless the API was not even reached; all else is tried again.

        Raises:
            Refused: the API says no.
            PipelineServerError: it cannot be reached, or failed; whether it did what was asked is not known.
        """
        given = {key: value for key, value in arguments.items() if value not in ("", None)}
        creates = "create" in operation or "upload" in operation
        for attempt in itertools.count(1):
            try:
                return self._ask_once(operation, given)
            except urllib3.exceptions.HTTPError as error:
                sentence, again = self._unreached(error), _never_sent(error) or not creates
            except ApiException as error:
                if error.status and error.status < 500 and error.status != 429:
                    raise Refused(self._refusal(error), error.status) from None
                sentence, again = self._refusal(error), error.status != 0 and not creates
            if not again or attempt == self.settings.attempts:
                raise PipelineServerError(sentence)
            time.sleep(min(BACKOFF_S * 2 ** (attempt - 1), BACKOFF_CAP_S))
        raise AssertionError("not reached")

    def pages(self, operation: str, field: str, **arguments: Any) -> Iterator[Any]:
        """The resources under ``field`` of every page of a list."""
        token = ""
        for _ in range(PAGES):
            page = self.ask(operation, page_size=PAGE_SIZE, page_token=token, **arguments)
            yield from getattr(page, field) or ()
            token = page.next_page_token
            if not token:
                return

    def named(self, operation: str, field: str, name: str, **arguments: Any) -> list[Any]:
        """Those whose display name is exactly ``name``; the API's own comparison does not tell A from a."""
        predicate = {"operation": "EQUALS", "key": "display_name", "string_value": name}
        # The API decodes a filter once more than HTTP does: unquoted, a + in a name would become a blank.
        encoded = quote(json.dumps({"predicates": [predicate]}))
        found = self.pages(operation, field, filter=encoded, **arguments)
        return [resource for resource in found if resource.display_name == name]

    def _ask_once(self, operation: str, given: Mapping[str, Any]) -> Any:
        method = next(getattr(s, f"{operation}_with_http_info") for s in self._services if hasattr(s, operation))
        limit_s = self.settings.timeout_s
        try:
            # As a pair: the generated client ignores a number with a fraction.
            answer, _, headers = method(**given, _request_timeout=(limit_s, limit_s))
        except OSError as error:  # the service account's token, which is read for each request
            raise PipelineServerError(f"The token for {self.url} cannot be read: {error}.") from None
        # A proxy that wants a log-in answers 200 with its page, which kfp would take for an empty list.
        if not headers.get("Content-Type", "").startswith("application/json"):
            raise Refused(
                f"{self.url} answered with a web page, a log-in most likely, instead of JSON: "
                f"renew {COOKIES_VARIABLE} or {TOKEN_VARIABLE}, and look whether pipeline.endpoint is the API's.",
                401,
            )
        return answer

    def _unreached(self, error: urllib3.exceptions.HTTPError) -> str:
        reason = getattr(error, "reason", None) or error
        match reason:
            case urllib3.exceptions.SSLError():
                hint = "name its CA in pipeline.ca_file"
                return f"The certificate of {self.url} is not trusted ({_last_words(reason)}); {hint}."
            case urllib3.exceptions.TimeoutError() if not isinstance(reason, urllib3.exceptions.NewConnectionError):
                return f"Kubeflow Pipelines at {self.url} did not answer within {self.settings.timeout_s:g} s."
            case _:
                hint = "check pipeline.endpoint and that the server is up"
                return f"Kubeflow Pipelines at {self.url} cannot be reached ({_last_words(reason)}); {hint}."

    def _refusal(self, error: ApiException) -> str:
        said = _message(error)
        match error.status:
            case 401:
                hint = f"set {TOKEN_VARIABLE} or {COOKIES_VARIABLE} to one that has not expired"
                return f"Kubeflow Pipelines at {self.url} does not know who asks: {hint}."
            case 403:
                hint = "check pipeline.namespace and what the role of the caller may do there"
                return f"Kubeflow Pipelines at {self.url} does not allow this ({said}); {hint}."
            case 400 if "empty namespace" in said:
                return f"Kubeflow Pipelines at {self.url} is multi-user ({said}); set pipeline.namespace."
            case _:
                return f"Kubeflow Pipelines at {self.url} answered {error.status}: {said}."


def _endpoint(settings: PipelineSettings, environment: Mapping[str, str]) -> str:
    if settings.endpoint:
        url = settings.endpoint.rstrip("/")
    elif environment.get("KUBERNETES_SERVICE_HOST"):
        url = IN_CLUSTER
    else:
        raise SettingsError(
            "Where Kubeflow Pipelines is has not been said: set pipeline.endpoint, for example "
            "EVERNEAR_PIPELINE__ENDPOINT=http://localhost:8080 with a kubectl port-forward to ml-pipeline-ui."
        )
    parts = urlsplit(url)
    host = parts.hostname or ""
    mounted = _mounted_token(environment)
    variable = next((v for v in (TOKEN_VARIABLE, COOKIES_VARIABLE) if environment.get(v)), None)
    secret = f"The token {mounted}" if mounted else variable
    if secret and parts.scheme == "http" and not (_is_loopback(host) or _is_inside_cluster(host)):
        raise SettingsError(f"{secret} would travel unencrypted to {host}; give pipeline.endpoint as https://.")
    return url


def _client(settings: PipelineSettings, url: str, environment: Mapping[str, str]) -> kfp_server_api.ApiClient:
    token, cookies = environment.get(TOKEN_VARIABLE), environment.get(COOKIES_VARIABLE)
    mounted = _mounted_token(environment)
    if settings.ca_file is not None and not settings.ca_file.is_file():
        raise SettingsError(f"The CA file {settings.ca_file} (pipeline.ca_file) cannot be read.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # "only works with Kubeflow Pipeline v2.0.0-beta.2 and later"
        client = kfp.Client(
            host=url,
            # Without one, kfp asks the server in its constructor whether it is multi-user, 5 times with 5 s between.
            # Ours goes with each call instead.
            namespace=settings.namespace or "-",
            existing_token=token,
            cookies=cookies,
            credentials=ServiceAccountTokenVolumeCredentials(str(mounted)) if mounted else None,
            ssl_ca_cert=str(settings.ca_file) if settings.ca_file else None,
        )
    # kfp.Client hands out neither time limits nor answers' headers; the generated API under it does both.
    api_client = client._run_api.api_client  # pyright: ignore[reportPrivateUsage]
    api_client.rest_client.pool_manager.connection_pool_kw["retries"] = urllib3.Retry(
        total=None, connect=0, read=0, other=0, redirect=5
    )
    return api_client


def _mounted_token(environment: Mapping[str, str]) -> Path | None:
    """The pod's own, where there is one and nothing in the environment goes before it."""
    mounted = Path(environment.get(KF_PIPELINES_SA_TOKEN_ENV, KF_PIPELINES_SA_TOKEN_PATH))
    given = environment.get(TOKEN_VARIABLE) or environment.get(COOKIES_VARIABLE)
    return mounted if not given and mounted.exists() else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_inside_cluster(host: str) -> bool:
    return host.endswith((".svc", ".svc.cluster.local"))


def _never_sent(error: urllib3.exceptions.HTTPError) -> bool:
    reason = getattr(error, "reason", None) or error
    return isinstance(reason, urllib3.exceptions.NewConnectionError | urllib3.exceptions.ConnectTimeoutError)


def _message(error: ApiException) -> str:
    """What the API said, from its JSON; uploads have another form of error than the rest."""
    try:
        body = json.loads(error.body or "")
        said = body.get("message") or body["error_message"]
    except (ValueError, KeyError, AttributeError, TypeError):
        said = error.reason or "no reason given"
    return said.strip().splitlines()[0].rstrip(".")


def _last_words(error: object) -> str:
    return str(error).rsplit(": ", 1)[-1].rstrip(". ")
