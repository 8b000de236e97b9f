"""Verify a release through its Service, which is the path that clients use."""

import os
import time

from pydantic import ValidationError

from evernear.common.environment import server_address
from evernear.deployment.kubernetes.cluster import Cluster
from evernear.deployment.target import PredictionClient, smoke
from evernear.errors import ClusterError, EvernearError, PredictionRejectedError, ServingError, SettingsError
from evernear.release.archive_reader import ReleaseParts
from evernear.serving.client import Client, Target, token_of_environment
from evernear.serving.responses import Prediction, Rejection
from evernear.settings import KubernetesSettings, RunSettings
from evernear.settings.serving import MODEL_NAME, RESPONSE_TIMEOUT_S
from evernear.settings.sources import SERVICE_URL_VARIABLE

PAUSE_S = 0.5
CONVERGENCE_TIMEOUT_S = 60
"""Time after a rollout until only the new release answers at the Service: clients of gRPC resolve
names at most every 30 s."""


def verify(client: PredictionClient, settings: KubernetesSettings, parts: ReleaseParts) -> int:
    """Send the stored queries to the Service, and return the number of answered ones.

    Endpoints are updated with a delay after a rollout, so a different release may answer for up to
    `CONVERGENCE_TIMEOUT_S`. The smoke test starts once this release has given as many consecutive
    answers as there are stored queries.
    """
    _await_release(client, settings, parts)
    return smoke(client, parts)


def service_url(settings: RunSettings) -> str:
    """The prediction URL inside the cluster."""
    return f"http://{_host(settings)}:{settings.serving.inference_port}/predictions/{MODEL_NAME}"


def service_client(cluster: Cluster, settings: RunSettings) -> PredictionClient:
    """A client of the URL in ``EVERNEAR_SERVICE_URL`` if it is set, otherwise of the Service's DNS
    name inside the cluster, and of the API server's proxy outside."""
    if text := os.environ.get(SERVICE_URL_VARIABLE):
        url = server_address(SERVICE_URL_VARIABLE, text)
        port = url.port or (443 if url.scheme == "https" else 80)
        return Client(_target(settings, url.hostname or "", port, tls=url.scheme == "https"))
    if cluster.inside:
        return Client(_target(settings, _host(settings), settings.serving.inference_port))
    if settings.kubernetes.token_secret:
        raise SettingsError(
            "The API server does not forward a token to a Service; deploy from inside the cluster, or set the "
            f"environment variable {SERVICE_URL_VARIABLE}=http://HOST:PORT to a URL of the Service."
        )
    return _ApiServerProxyClient(cluster, settings)


def _host(settings: RunSettings) -> str:
    return f"{settings.kubernetes.name}.{settings.kubernetes.namespace}.svc"


def _target(settings: RunSettings, host: str, port: int, *, tls: bool = False) -> Target:
    return Target(
        host=host,
        port=port,
        model=MODEL_NAME,
        token=token_of_environment,
        tls=tls,
        timeout_s=RESPONSE_TIMEOUT_S,
        max_size_bytes=settings.serving.max_request_size_bytes,
        hint="its NetworkPolicy lets in the namespaces of kubernetes.client_namespaces",
    )


def _await_release(client: PredictionClient, settings: KubernetesSettings, parts: ReleaseParts) -> None:
    version = parts.manifest.version
    queries = parts.smoke_queries()
    deadline_s = time.monotonic() + CONVERGENCE_TIMEOUT_S
    answered = 0
    while answered < len(queries):
        try:
            live = client.predict(queries[answered][0]).version
            fault = f"it answers with release {live}"
        except (ServingError, ClusterError) as error:
            live, fault = None, str(error).rstrip(".")
        if live == version:
            answered += 1
            continue
        if time.monotonic() > deadline_s:
            raise ServingError(
                f"the Service {settings.name} does not answer with release {version} alone after "
                f"{CONVERGENCE_TIMEOUT_S} s: {fault}."
            )
        answered = 0
        time.sleep(PAUSE_S)


class _ApiServerProxyClient:
    """A Service's ``proxy`` subresource, reachable like the API server. It forwards no tokens."""

    def __init__(self, cluster: Cluster, settings: RunSettings) -> None:
        self._cluster = cluster
        self._service = settings.kubernetes.name
        self._path = f"/predictions/{MODEL_NAME}"
        self._timeout_s = RESPONSE_TIMEOUT_S

    def predict(self, image: bytes, version: str | None = None) -> Prediction:
        path = f"{self._path}/{version}" if version else self._path
        status, content = self._cluster.post_to_service(self._service, "http", path, image, self._timeout_s)
        if status != 200:
            raise _refusal(status, content)
        try:
            return Prediction.model_validate(content)
        except ValidationError:
            raise ServingError(f"The Service {self._service} does not respond like an evernear release.") from None


def _refusal(status: int, content: str) -> EvernearError:
    try:
        reason = Rejection.model_validate_json(content).message
    except ValidationError:
        reason = f"it answers {status}."
    return PredictionRejectedError(reason) if status < 500 else ServingError(reason)
