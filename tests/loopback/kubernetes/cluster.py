"""A cluster for tests: the API server, its controllers, its node, and methods that control them."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from tests.certificates import server_tls, write_certificate
from tests.loopback.kubernetes import rbac
from tests.loopback.kubernetes.api import Api
from tests.loopback.kubernetes.calls import Call
from tests.loopback.kubernetes.controllers import Controllers
from tests.loopback.kubernetes.kinds import KINDS, POD
from tests.loopback.kubernetes.kubelet import Node
from tests.loopback.kubernetes.pod_lifecycle import PodBehavior, Ready
from tests.loopback.kubernetes.server import Fault, Server
from tests.loopback.kubernetes.status import ApiError

Object = dict[str, Any]
VERSION = "1.34"


class LoopbackCluster:
    """One Kubernetes cluster on loopback; a context manager.

    ``second_s`` is the real duration of one second of ``progressDeadlineSeconds``: by default, 600
    s pass in 0.6 s.
    """

    def __init__(self, directory: Path, *, second_s: float = 0.001) -> None:
        self._directory = directory
        self._behaviors: list[tuple[Callable[[Object], bool], Callable[[Object], PodBehavior]]] = []
        self.api = Api(VERSION)
        self._node = Node(self.api, self._behavior)
        self._controllers = Controllers(self.api, self._node, second_s)
        self._server = Server(self.api, self._node, server_tls())

    def __enter__(self) -> Self:
        self._controllers.start()
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.stop()
        self._controllers.stop()

    @property
    def url(self) -> str:
        """The URL of the API server."""
        return f"https://127.0.0.1:{self._server.server_port}"

    @property
    def calls(self) -> list[Call]:
        """Every request so far, oldest first."""
        return self._server.calls

    def kubeconfig(self, service_account: str = "", *, namespace: str = "default") -> Path:
        """Write a kubeconfig for the administrator, or for the service account
        ``NAMESPACE/NAME``."""
        account_namespace, _, name = service_account.partition("/")
        user = f"system:serviceaccount:{account_namespace}:{name}" if service_account else rbac.ADMIN
        token = self._server.create_token(user)
        authority, _ = write_certificate(self._directory)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "loopback", "cluster": {"server": self.url, "certificate-authority": str(authority)}}
            ],
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [
                {"name": "loopback", "context": {"cluster": "loopback", "user": user, "namespace": namespace}}
            ],
            "current-context": "loopback",
        }
        path = self._directory / f"kubeconfig-{user.replace(':', '-')}"
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return path

    def create(self, manifest: Object, namespace: str = "") -> None:
        """Create an object as the administrator, by default in its own namespace."""
        self.api.create(KINDS[manifest["kind"]], manifest, namespace)

    def find(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return an object of a kind such as ``Pod``, or None."""
        return self.api.store.get(KINDS[kind], namespace, name)

    def running_pods(self, namespace: str) -> list[Object]:
        """Return the pods that are not being deleted."""
        return [pod for pod in self.api.store.all(POD, namespace) if not pod["metadata"].get("deletionTimestamp")]

    def set_pod_behavior(
        self,
        behavior: PodBehavior | Callable[[Object], PodBehavior],
        when: Callable[[Object], bool] = lambda pod: True,
    ) -> None:
        """Set the behavior of the pods that ``when`` selects; later calls take precedence. The
        default is ``Ready()``.

        A function receives the pod and returns its behavior; it is called often and must be fast.
        """
        self._behaviors.insert(0, (when, behavior if callable(behavior) else lambda _: behavior))
        self._controllers.wake()

    def fail(
        self, error: ApiError, when: Callable[[Call], bool] = lambda call: True, *, times: int = 1, after: bool = False
    ) -> None:
        """Fail the next ``times`` requests that ``when`` selects; ``after``: only after executing
        them."""
        self._server.faults.append(Fault(when, times, error, after))

    def drop(self, when: Callable[[Call], bool] = lambda call: True, *, times: int = 1, after: bool = False) -> None:
        """Close the connection of the next ``times`` requests that ``when`` selects, without a
        response."""
        self._server.faults.append(Fault(when, times, None, after))

    def lose_node(self, train_job: str) -> None:
        """Kill the last node of a running TrainJob, as if its machine were lost."""
        self._controllers.train_jobs.processes(train_job)[-1].kill()

    def drain(self, job: str, index: int) -> None:
        """Evict the running pod of an index of a Job, as the drain of its node does."""
        self._controllers.jobs.evict(job, index)

    def drop_watches(self) -> None:
        """Drop the connections of all open watches."""
        with self.api.store.changed:
            self._server.watches_dropped += 1
            self.api.store.changed.notify_all()

    def expire(self) -> None:
        """Compact the history: watches and lists that continue from an older resourceVersion get a
        410."""
        self.api.store.expire()

    def _behavior(self, pod: Object) -> PodBehavior:
        return next((behave(pod) for when, behave in self._behaviors if when(pod)), Ready())


def too_many_requests(retry_after_s: int = 1) -> ApiError:
    """A 429 with a ``Retry-After`` header."""
    message = "the server has received too many requests and has asked us to try again later"
    return ApiError(429, message, retry_after_s=retry_after_s)


def internal_error(reason: str = "etcdserver: request timed out") -> ApiError:
    """A 500."""
    return ApiError(500, f"Internal error occurred: {reason}")


def labeled(name: str, value: str) -> Callable[[Object], bool]:
    """Select pods by a label or an annotation."""

    def picks(pod: Object) -> bool:
        metadata = pod["metadata"]
        return value in ((metadata.get("labels") or {}).get(name), (metadata.get("annotations") or {}).get(name))

    return picks
