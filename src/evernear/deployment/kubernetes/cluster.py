"""A client for one namespace of a Kubernetes API server, and the labels of evernear's objects.

Objects are plain dicts, as in a manifest. The `kubernetes` client sends the requests, but its
generated models would drop unknown fields.
"""

import builtins
import json
import os
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import urllib3
import yaml
from kubernetes import config
from kubernetes.client import ApiClient, Configuration
from kubernetes.client.exceptions import ApiException, OpenApiException
from kubernetes.config.config_exception import ConfigException
from kubernetes.watch import Watch

from evernear.common.output import root_cause
from evernear.errors import ClusterError
from evernear.settings import KubernetesSettings

PREFIX = "evernear.dev"
RELEASE = f"{PREFIX}/release"
MANIFEST_SHA256 = f"{PREFIX}/manifest-sha256"
ARCHIVE_SHA256 = f"{PREFIX}/archive-sha256"
SETTINGS_SHA256 = f"{PREFIX}/settings-sha256"
REVISION = f"{PREFIX}/revision"
"""A pod label with a hash of the pod template, which selects the pods of one rollout."""
VERSION = "app.kubernetes.io/version"
COMMON_LABELS = {"app.kubernetes.io/part-of": "evernear", "app.kubernetes.io/managed-by": "evernear"}
WATCHER = {"app.kubernetes.io/name": "evernear", "app.kubernetes.io/component": "watch"}
"""The watcher's pod, which compares releases after a rollout."""

Tree = dict[str, Any]

FIELD_MANAGER = "evernear"
TAKE_OVER = (
    f"evernear deployment render | kubectl apply --server-side --field-manager={FIELD_MANAGER} --force-conflicts -f -"
)
"""Applies the champion again, and takes the ownership of all its fields."""
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
TIMEOUT_S = (10, 30)  # seconds to connect, and between two packets
MAX_ATTEMPTS = 5
BACKOFF_S = 0.5
OVERLOADED = (429, 500, 502, 503, 504)
RESOURCES = {
    "ConfigMap": ("v1", "configmaps"),
    "Deployment": ("apps/v1", "deployments"),
    "Event": ("v1", "events"),
    "HorizontalPodAutoscaler": ("autoscaling/v2", "horizontalpodautoscalers"),
    "Job": ("batch/v1", "jobs"),
    "Lease": ("coordination.k8s.io/v1", "leases"),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
    "Pod": ("v1", "pods"),
    "PodTemplate": ("v1", "podtemplates"),
    "PodDisruptionBudget": ("policy/v1", "poddisruptionbudgets"),
    "Service": ("v1", "services"),
    "ServiceAccount": ("v1", "serviceaccounts"),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", "trainjobs"),
}
"""The API version and the plural resource name of each kind in use."""
_MISSING_PERMISSION = re.compile(r'is forbidden: User ".*" cannot ')
"""A 403 response from the authorizer, and not from admission control (webhooks, quotas)."""
_ANONYMOUS = 'User "system:anonymous"'


class Cluster:
    """A namespace on a Kubernetes API server. Every method may raise `ClusterError`."""

    def __init__(self, client: ApiClient, namespace: str, *, inside: bool) -> None:
        self._client = client
        self._watch: Any = Watch()
        self.namespace = namespace
        self.inside = inside
        """Whether this process runs in a pod of the cluster."""

    @classmethod
    def of(cls, namespace: str = "") -> "Cluster":
        """Connect with the pod's service account, or with a kubeconfig, which takes precedence if
        ``KUBECONFIG`` is set. Default: the namespace of the pod, or of the kubeconfig's context."""
        configuration: Any = Configuration()
        inside = "KUBERNETES_SERVICE_HOST" in os.environ and not os.environ.get("KUBECONFIG")
        try:
            if inside:
                config.load_incluster_config(client_configuration=configuration)
            else:
                config.load_kube_config(_kubeconfig(), client_configuration=configuration)
            namespace = namespace or _own_namespace(inside=inside)
        # The client parses a kubeconfig that is not YAML, or YAML of another shape, without checks.
        except (ConfigException, OSError, yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ClusterError(_no_credentials(error)) from None
        configuration.retries = urllib3.Retry(
            MAX_ATTEMPTS - 1,
            status_forcelist=OVERLOADED,
            allowed_methods=None,  # an apply is idempotent; other writes carry a resourceVersion
            backoff_factor=BACKOFF_S,
            raise_on_status=False,
            respect_retry_after_header=False,  # the server may ask for an hour, too long for a pipeline step
        )
        return cls(ApiClient(configuration), namespace, inside=inside)

    @property
    def host(self) -> str:
        return str(self._client.configuration.host)

    def get(self, kind: str, name: str) -> Tree | None:
        try:
            return self._call("GET", self._path(kind, name))
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    def list(self, kind: str, **query: str) -> builtins.list[Tree]:
        """``query`` is a ``labelSelector`` or ``fieldSelector``."""
        return self._call("GET", self._path(kind), query=query)["items"]

    def apply(self, manifest: Tree, *, force: bool = False, dry_run: bool = False) -> Tree:
        """Server-side apply with the field manager ``evernear``. Without ``force``, a
        `ClusterError` with status 409 means that a different manager set a field differently."""
        query = {"fieldManager": FIELD_MANAGER, "force": str(force).lower()}
        if dry_run:
            query["dryRun"] = "All"
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        try:
            return self._call("PATCH", self._path(kind, name), manifest, query)
        except ClusterError as error:
            if error.status == 409:  # the error's message does not name the object
                raise ClusterError(f"{kind} {name}: {error}", 409) from None
            raise

    def create(self, manifest: Tree) -> Tree:
        """A `ClusterError` with status 409 means that the object already exists."""
        return self._call("POST", self._path(manifest["kind"]), manifest)

    def replace(self, manifest: Tree) -> Tree:
        """A `ClusterError` with status 409 means that the object has changed since it was read."""
        return self._call("PUT", self._path(manifest["kind"], manifest["metadata"]["name"]), manifest)

    def delete(self, kind: str, name: str) -> None:
        """Delete an object and its dependents. A missing one is not an error."""
        try:
            self._call("DELETE", self._path(kind, name), query={"propagationPolicy": "Background"})
        except ClusterError as error:
            if error.status != 404:
                raise

    def changes(self, manifest: Tree, timeout_s: int) -> Iterator[Tree]:
        """Watch an object, last read as ``manifest``, for at most ``timeout_s``.

        The iterator ends early if the watch is interrupted, the ``resourceVersion`` has expired, or
        the object is deleted. The caller must then read the object again.
        """
        metadata = manifest["metadata"]
        events = self._watch.stream(
            self._watched,
            manifest["kind"],
            resource_version=metadata["resourceVersion"],
            field_selector=f"metadata.name={metadata['name']}",
            timeout_seconds=timeout_s,
        )
        try:
            for event in events:
                if event["type"] == "DELETED":
                    return
                if event["type"] != "BOOKMARK":
                    yield event["raw_object"]
        except (ApiException, urllib3.exceptions.HTTPError, ValueError, KeyError):
            return

    def log(self, pod: str, container: str, *, previous: bool, lines: int) -> builtins.list[str]:
        """The last lines of a container's log, or an empty list if it is unavailable."""
        query = {"container": container, "previous": str(previous).lower(), "tailLines": str(lines)}
        try:
            with self._errors():
                response = self._send("GET", f"{self._path('Pod', pod)}/log", query=query, stream=True)
                text = response.data.decode(errors="replace")
        except ClusterError:
            return []
        return [line.strip() for line in text.splitlines() if line.strip()]

    def is_allowed(self, verb: str, kind: str, name: str) -> bool:
        """Whether ``verb`` is permitted on an object or on a subresource such as ``Pod/log``."""
        kind, _, subresource = kind.partition("/")
        version, plural = RESOURCES[kind]
        attributes = {
            "namespace": self.namespace,
            "verb": verb,
            "group": version.rpartition("/")[0],
            "resource": plural,
            "subresource": subresource,
            "name": name,
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        return bool(self._call("POST", path, review)["status"]["allowed"])

    def post_to_service(self, service: str, port: str, path: str, body: bytes, timeout_s: float) -> tuple[int, Any]:
        """POST to a Service through the API server's proxy. Return the status and the content."""
        resource = f"{self._path('Service')}/{service}:{port}/proxy{path}"
        with self._errors():
            try:
                return 200, self._send("POST", resource, body, timeout_s=timeout_s)
            except ApiException as error:
                if _status(error) is not None:
                    raise
                return int(error.status or 0), error.body

    def _path(self, kind: str, name: str = "") -> str:
        version, plural = RESOURCES[kind]
        group = f"/apis/{version}" if "/" in version else f"/api/{version}"
        return f"{group}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def _call(self, method: str, path: str, body: Tree | None = None, query: dict[str, str] | None = None) -> Tree:
        with self._errors():
            content = self._send(method, path, body, query)
        if not isinstance(content, dict) or "kind" not in content:
            raise ClusterError(f"The server at {self.host} is not a Kubernetes API server.")
        return cast("Tree", content)

    def _send(
        self,
        method: str,
        path: str,
        body: Tree | bytes | None = None,
        query: dict[str, str] | None = None,
        timeout_s: float = TIMEOUT_S[1],
        stream: bool = False,
    ) -> Any:
        """Send a request with retries. Return the parsed content, or the unread ``stream``."""
        content_type = "application/apply-patch+yaml" if method == "PATCH" else "application/json"
        if isinstance(body, bytes):
            content_type = "application/octet-stream"
        return self._client.call_api(
            path,
            method,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json, */*", "Content-Type": content_type},
            body=body,
            response_type="object",
            auth_settings=["BearerToken"],
            _return_http_data_only=True,
            _preload_content=not stream,
            _request_timeout=(TIMEOUT_S[0], timeout_s),
        )

    def _watched(self, kind: str, **query: Any) -> Any:
        """The list function for `Watch`, with the parameter names of the generated client."""
        timeout_s = query["timeout_seconds"]
        parameters = {
            "watch": "true",
            "resourceVersion": str(query["resource_version"]),
            "fieldSelector": query["field_selector"],
            "timeoutSeconds": str(timeout_s),
        }
        return self._send("GET", self._path(kind), query=parameters, timeout_s=timeout_s + TIMEOUT_S[1], stream=True)

    @contextmanager
    def _errors(self) -> Generator[None]:
        """Convert each client exception to a `ClusterError` with a one-sentence message."""
        try:
            yield
        except ApiException as error:
            raise self._explain(error) from None
        except (urllib3.exceptions.HTTPError, OpenApiException) as error:
            raise ClusterError(f"The API server at {self.host} cannot be reached: {root_cause(error)}.", 503) from None

    def _explain(self, error: ApiException) -> ClusterError:
        status = _status(error)
        if status is None:
            fault = f"answered {error.status} {error.reason}" if error.status else f"cannot be reached: {error.reason}"
            return ClusterError(f"The API server at {self.host} {' '.join(fault.split())}.", 503)
        message = str(status.get("message", error.reason)).strip().rstrip(".")
        match error.status:
            case 401:
                return ClusterError(f"The API server at {self.host} does not accept the credentials ({message}).")
            case 403:
                remedy = (
                    "; docs/kubernetes.md has the Role that is needed" if _MISSING_PERMISSION.search(message) else ""
                )
                if _ANONYMOUS in message:
                    remedy = (
                        "; the request had no credentials: check the kubeconfig's user and the command that it runs"
                    )
                return ClusterError(f"The API server refuses: {message}{remedy}.")
            case 404:
                return ClusterError(f"The API server answered 404: {message}.", 404)
            case 409:
                return ClusterError(_conflict(status, message), 409)
            case 429 | 500 | 502 | 503 | 504 as code:
                return ClusterError(
                    f"The API server at {self.host} still fails after {MAX_ATTEMPTS} attempts: {code} {message}.", 503
                )
            case _:
                return ClusterError(f"The API server refuses: {message}.")


def _status(error: ApiException) -> Tree | None:
    """The ``Status`` object of an error response, None if not from the API server."""
    try:
        body: Any = json.loads(error.body or b"")
    except ValueError:
        return None
    return cast("Tree", body) if isinstance(body, dict) and cast("Tree", body).get("kind") == "Status" else None


def _conflict(status: Tree, message: str) -> str:
    """The message for a 409 response. After an apply, it lists the conflicting fields."""
    details: Tree = status.get("details") or {}
    fields_of: dict[str, list[str]] = {}
    for cause in details.get("causes") or []:
        if cause.get("reason") == "FieldManagerConflict":
            fields_of.setdefault(cause["message"].removeprefix("conflict with "), []).append(cause["field"])
    if not fields_of:
        return f"The API server refuses: {message}."
    fields = "; ".join(f"{manager} set {', '.join(names)}" for manager, names in fields_of.items())
    return f"{fields}; release it there, or take it over with `{TAKE_OVER}`."


def _kubeconfig() -> str:
    """The path that kubectl uses. The `kubernetes` client determines it only at import."""
    return os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())


def _own_namespace(*, inside: bool) -> str:
    if inside:
        return NAMESPACE_FILE.read_text().strip()
    _, current = config.list_kube_config_contexts(_kubeconfig())
    return current["context"].get("namespace") or "default"


def _no_credentials(error: Exception) -> str:
    kubeconfig = _kubeconfig()
    if any(Path(path).exists() for path in kubeconfig.split(os.pathsep) if path):
        return f"The kubeconfig {kubeconfig} cannot be used: {' '.join(str(error).split()).rstrip('.')}."
    return (
        "No cluster is configured: this process does not run in a pod with a service account, and"
        f" {kubeconfig} does not exist; set KUBECONFIG."
    )


def selector(kubernetes: KubernetesSettings) -> dict[str, str]:
    """The immutable labels that select the pods."""
    return {
        "app.kubernetes.io/name": "evernear",
        "app.kubernetes.io/instance": kubernetes.name,
        "app.kubernetes.io/component": "serving",
    }
