"""Prove a release through its Service, the way that clients come."""

import time
from urllib.parse import urlsplit

from pydantic import ValidationError

from evernear.deployment.kubernetes.cluster import Cluster
from evernear.deployment.smoke import Predicts, smoke
from evernear.errors import ClusterError, EvernearError, PredictionRejectedError, ServingError, SettingsError
from evernear.release.archive_reader import ReleaseParts
from evernear.serving.client import Client, Target
from evernear.serving.client.target import token_of_environment
from evernear.serving.responses import Prediction, Rejection
from evernear.settings import KubernetesSettings, RunSettings

PAUSE_S = 0.5


def prove(client: Predicts, settings: KubernetesSettings, parts: ReleaseParts) -> int:
    """Ask the Service the release's stored queries; the number that were answered.

    A Service follows a rollout a little later, so for ``convergence_timeout_s`` it may still answer with another
    release; the queries count from when it answered with this one as often as there are queries.

    Raises:
        ServingError: it answers otherwise than when the release was archived, or with another release, or not at all.
    """
    _await_release(client, settings, parts)
    return smoke(client, parts)


def service_host(settings: RunSettings) -> str:
    """The Service's name within the cluster."""
    return f"{settings.kubernetes.name}.{settings.kubernetes.namespace}.svc"


def service_client(cluster: Cluster, settings: RunSettings) -> Predicts:
    """Who asks the Service: by its URL where one is set, by its name from inside, else through the API server.

    Raises:
        SettingsError: a token is asked for, and the API server would not pass it on.
    """
    url = urlsplit(settings.kubernetes.service_url)
    if url.hostname:
        port = url.port or (443 if url.scheme == "https" else 80)
        return Client(_target(settings, url.hostname, port, tls=url.scheme == "https"))
    if cluster.inside:
        return Client(_target(settings, service_host(settings), settings.serving.inference_port))
    if settings.kubernetes.token_secret:
        raise SettingsError(
            "The API server passes no token on to a Service; deploy from inside the cluster, or say where the Service "
            "can be reached with --set kubernetes.service_url=http://HOST:PORT."
        )
    return _ThroughApiServer(cluster, settings)


def _target(settings: RunSettings, host: str, port: int, *, tls: bool = False) -> Target:
    return Target(
        host=host,
        port=port,
        model=settings.serving.model_name,
        token=token_of_environment,
        tls=tls,
        timeout_s=settings.serving.response_timeout_s,
        max_size_bytes=settings.serving.max_request_size_bytes,
        hint="its NetworkPolicy lets in the namespaces of kubernetes.client_namespaces",
    )


def _await_release(client: Predicts, settings: KubernetesSettings, parts: ReleaseParts) -> None:
    version = parts.manifest.version
    queries = parts.smoke_queries()
    deadline_s = time.monotonic() + settings.convergence_timeout_s
    answered = 0
    while answered < len(queries):
        try:
            answer = client.predict(queries[answered][0]).version
            fault = f"it answers with release {answer}"
        except (ServingError, ClusterError) as error:
            answer, fault = None, str(error).rstrip(".")
        if answer == version:
            answered += 1
            continue
        if time.monotonic() > deadline_s:
            raise ServingError(
                f"the Service {settings.name} does not answer with release {version} alone after "
                f"{settings.convergence_timeout_s} s: {fault}."
            )
        answered = 0
        time.sleep(PAUSE_S)


class _ThroughApiServer:
    """The ``proxy`` of a Service: reachable wherever the API server is, but without a token of its own."""

    def __init__(self, cluster: Cluster, settings: RunSettings) -> None:
        self._cluster = cluster
        self._service = settings.kubernetes.name
        self._path = f"/predictions/{settings.serving.model_name}"
        self._timeout_s = settings.serving.response_timeout_s

    def predict(self, image: bytes, version: str | None = None) -> Prediction:
        """As `evernear.serving.client.Client.predict`."""
        path = f"{self._path}/{version}" if version else self._path
        status, content = self._cluster.post_to_service(self._service, "http", path, image, self._timeout_s)
        if status != 200:
            raise _refusal(status, content)
        try:
            return Prediction.model_validate(content)
        except ValidationError:
            raise ServingError(f"What answers at the Service {self._service} is no evernear release.") from None


def _refusal(status: int, content: str) -> EvernearError:
    try:
        reason = Rejection.model_validate_json(content).message
    except ValidationError:
        reason = f"it answers {status}."
    return PredictionRejectedError(reason) if status < 500 else ServingError(reason)
