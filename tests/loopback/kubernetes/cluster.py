"""A cluster for tests: the server, its controllers and its node, with the handles that a test needs."""

import datetime
import ipaddress
import ssl
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from loopback.kubernetes import rbac, status
from loopback.kubernetes.api import Api
from loopback.kubernetes.calls import Call
from loopback.kubernetes.controllers import Controllers
from loopback.kubernetes.kubelet import Node
from loopback.kubernetes.server import Fault, Server
from loopback.kubernetes.status import ApiError
from loopback.kubernetes.stories import Behaviour, Ready

Object = dict[str, Any]
OLDEST, NEWEST = "1.30", "1.34"


class LoopbackCluster:
    """One Kubernetes cluster of version ``version`` on loopback; a context manager.

    ``second_s``: how long a second of ``progressDeadlineSeconds`` really takes, so that 600 s pass in 0.6 s.
    """

    def __init__(self, directory: Path, *, version: str = NEWEST, second_s: float = 0.001) -> None:
        self._directory = directory
        self._behaviours: list[tuple[Callable[[Object], bool], Callable[[Object], Behaviour]]] = []
        self.api = Api(version)
        self._node = Node(self.api, self._behaviour)
        self._controllers = Controllers(self.api, self._node, second_s)
        self._server = Server(self.api, self._node, _tls())

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
        """Where the API is."""
        return f"https://127.0.0.1:{self._server.server_port}"

    @property
    def calls(self) -> list[Call]:
        """Every request so far."""
        return self._server.calls

    def kubeconfig(self, service_account: str = "", *, namespace: str = "default") -> Path:
        """A kubeconfig for the administrator, or for a service account, ``NAMESPACE/NAME``, with just its Roles."""
        account_namespace, _, name = service_account.partition("/")
        user = f"system:serviceaccount:{account_namespace}:{name}" if service_account else rbac.ADMIN
        token = self._server.token_of(user)
        authority = self._directory / "ca.crt"
        authority.write_bytes(_certificate()[0])
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

    def pods_do(
        self,
        behaviour: Behaviour | Callable[[Object], Behaviour],
        when: Callable[[Object], bool] = lambda pod: True,
    ) -> None:
        """From now on pods that ``when`` picks behave like this; what was said last wins. At first: ``Ready()``.

        A function is told the pod and says what it does; it is asked often, so it should be quick.
        """
        self._behaviours.insert(0, (when, behaviour if callable(behaviour) else lambda _: behaviour))
        self._controllers.wake()

    def fail(
        self, error: ApiError, when: Callable[[Call], bool] = lambda call: True, *, times: int = 1, after: bool = False
    ) -> None:
        """Answer the next ``times`` requests that ``when`` picks with an error; ``after``: when they have been done."""
        self._server.faults.append(Fault(when, times, error, after))

    def drop(self, when: Callable[[Call], bool] = lambda call: True, *, times: int = 1, after: bool = False) -> None:
        """Close the connection of the next ``times`` requests that ``when`` picks, without an answer."""
        self._server.faults.append(Fault(when, times, None, after))

    def drop_watches(self) -> None:
        """Cut the watches that are open now, in the middle."""
        with self.api.store.changed:
            self._server.watches_dropped += 1
            self.api.store.changed.notify_all()

    def expire(self) -> None:
        """Forget the history: watches and lists that go on from an older resourceVersion are told 410."""
        self.api.store.expire()

    def _behaviour(self, pod: Object) -> Behaviour:
        return next((behave(pod) for when, behave in self._behaviours if when(pod)), Ready())


def too_many_requests(retry_after_s: int = 1) -> ApiError:
    """429, to be tried again after so long."""
    return status.too_many_requests(retry_after_s)


def internal_error(why: str = "etcdserver: request timed out") -> ApiError:
    """500."""
    return status.internal(why)


def modified(call_kind: Any, name: str) -> ApiError:
    """409, somebody wrote first."""
    return status.conflict(call_kind, name)


def carries(name: str, value: str) -> Callable[[Object], bool]:
    """Picks pods by a label or an annotation."""

    def picks(pod: Object) -> bool:
        metadata = pod["metadata"]
        return value in ((metadata.get("labels") or {}).get(name), (metadata.get("annotations") or {}).get(name))

    return picks


@cache
def _certificate() -> tuple[bytes, bytes]:
    """A certificate of our own for 127.0.0.1 and its key, PEM, made once per process."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "loopback")])
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private


@cache
def _tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as directory:
        for name, content in zip(("crt", "key"), _certificate(), strict=True):
            (Path(directory) / name).write_bytes(content)
        context.load_cert_chain(Path(directory) / "crt", Path(directory) / "key")
    return context
