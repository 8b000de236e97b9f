"""The HTTP layer: TLS, tokens, paths, watches, injected faults, and the proxy to services and
pods."""

import http.client
import json
import secrets
import select
import socket
import ssl
import sys
import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.loopback.kubernetes import proxy, rbac, status, watches
from tests.loopback.kubernetes.api import Api
from tests.loopback.kubernetes.calls import HEALTH, REVIEW, Call, name_selected, parse
from tests.loopback.kubernetes.fields import Manager
from tests.loopback.kubernetes.kinds import POD
from tests.loopback.kubernetes.kubelet import Node
from tests.loopback.kubernetes.status import ApiError

Object = dict[str, Any]
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "upgrade", "te", "trailer"}


@dataclass
class Fault:
    """A fault for the next ``times`` requests that ``when`` selects; without ``error``, the
    connection is dropped."""

    when: Callable[[Call], bool]
    times: int
    error: ApiError | None
    after: bool = False  # execute the request and lose only the response


class Server(ThreadingHTTPServer):
    """Serves one `Api` on a free loopback port."""

    daemon_threads = True
    block_on_close = True

    def __init__(self, api: Api, node: Node, context: ssl.SSLContext) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.api, self.node = api, node
        self._users: dict[str, str] = {}  # by token
        self.calls: list[Call] = []
        self.faults: list[Fault] = []
        self.watches_dropped = 0
        self.stopping = False
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), name="api-server", daemon=True)

    def start(self) -> None:
        """Start serving."""
        self._thread.start()

    def stop(self) -> None:
        """Close every connection and stop."""
        self.stopping = True
        self.shutdown()
        self._thread.join()
        with self.api.store.changed:
            self.api.store.changed.notify_all()
        for connection in list(self._open):
            _close(connection)
        self.server_close()

    def create_token(self, user: str) -> str:
        """Create a token for a user."""
        token = secrets.token_urlsafe(24)
        self._users[token] = user
        return token

    def user_of(self, token: str) -> str | None:
        """Return the user of a token, or None if the token is unknown."""
        return self._users.get(token)

    def take_fault(self, call: Call) -> Fault | None:
        """Return the fault for this request and decrement its count."""
        with self.api.store.changed:
            for fault in self.faults:
                if fault.times and fault.when(call):
                    fault.times -= 1
                    return fault
            return None

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore disconnected clients; report all other errors."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Handles the requests of one connection."""

    protocol_version = "HTTP/1.1"
    server: Server
    server_version = "evernear-loopback"
    disable_nagle_algorithm = True
    timeout = 60

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        self._respond()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = do_GET  # noqa: N815

    def _respond(self) -> None:
        body = self._body()
        fault = None
        try:
            call = self._read_call()
            self.server.calls.append(call)
            fault = self.server.take_fault(call)
            if fault and not fault.after:
                self._inject(fault)
                return
            if call.kind is None:
                self._respond_without_object(call, body)
                return
            name = call.name or name_selected(call)
            attempt = rbac.Attempt(call.user, call.verb, call.kind, call.namespace, name, call.subresource)
            rbac.authorize(self.server.api.store, attempt)
            code, result = self._execute(call, body)
        except ApiError as error:
            self._respond_error(error)
            return
        if fault:
            self._inject(fault)
        elif isinstance(result, str):
            self._respond_bytes(code, result.encode(), "text/plain")
        elif result is not None:
            self._respond_json(code, result)

    def _respond_without_object(self, call: Call, body: bytes) -> None:
        if call.path in HEALTH:
            self._respond_bytes(200, b"ok", "text/plain")
        elif call.path == REVIEW:
            self._respond_json(201, rbac.review(self.server.api.store, call.user, _decode(body)))
        else:
            self._respond_error(status.no_such_path())

    def _inject(self, fault: Fault) -> None:
        if fault.error:
            self._respond_error(fault.error)
        else:
            self.close_connection = True
            _close(self.connection)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _read_call(self) -> Call:
        scheme, _, token = (self.headers.get("Authorization") or "").partition(" ")
        user = self.server.user_of(token) if scheme.lower() == "bearer" else None
        if user is None:
            raise ApiError(401, "Unauthorized")
        url = urllib.parse.urlsplit(self.path)
        query = {key: values[-1] for key, values in urllib.parse.parse_qs(url.query).items()}
        return parse(self.command, url.path, query, user)

    def _execute(self, call: Call, body: bytes) -> tuple[int, Object | str | None]:
        assert call.kind is not None
        if call.subresource == "proxy":
            self._proxy(call, body)
            return 200, None
        if call.verb == "watch":
            self._watch(call)
            return 200, None
        if call.subresource == "log":
            return 200, self._log(call)
        if call.verb in ("get", "list"):
            return 200, _read(self.server.api, call)
        if call.verb == "delete":
            return 200, self.server.api.delete(call.kind, call.namespace, call.name)
        return self._write(call, body)

    def _write(self, call: Call, body: bytes) -> tuple[int, Object]:
        assert call.kind is not None
        api, subject = self.server.api, _decode(body)
        is_apply = self.headers["Content-Type"] == "application/apply-patch+yaml"
        assert is_apply or "dryRun" not in call.query
        # Without fieldManager, the manager is the first word of the User-Agent.
        name = call.query.get("fieldManager") or self.headers["User-Agent"].partition("/")[0]
        manager = Manager(name, "Apply" if is_apply else "Update", call.kind.api_version)
        if call.verb == "create":
            return 201, api.create(call.kind, subject, call.namespace, manager=manager)
        if call.verb == "update":
            return 200, api.replace(call.kind, subject, call.namespace, call.name, manager=manager)
        if not is_apply:
            return 200, api.patch(call.kind, subject, call.namespace, call.name, manager=manager)
        options = {"force": call.query.get("force") == "true", "dry_run": call.query.get("dryRun") == "All"}
        with api.store.changed:
            if api.store.get(call.kind, call.namespace, call.name) is None:
                attempt = rbac.Attempt(call.user, "create", call.kind, call.namespace, call.name)
                rbac.authorize(api.store, attempt)
            applied, is_new = api.apply(call.kind, subject, call.namespace, call.name, manager=manager, **options)
        return 201 if is_new else 200, applied

    def _log(self, call: Call) -> str:
        pod = self.server.api.get(POD, call.namespace, call.name)
        containers = [*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"]]
        container = call.query.get("container", "")
        if container not in (item["name"] for item in containers):
            raise status.bad_request(f"container {container} is not valid for pod {call.name}")
        log = self.server.node.log(pod, container, previous=call.query.get("previous") == "true")
        return "".join(log.splitlines(keepends=True)[-int(call.query["tailLines"]) :])

    def _watch(self, call: Call) -> None:
        """Stream events until the watch ends or the client disconnects."""
        server, dropped = self.server, self.server.watches_dropped

        def is_cut() -> bool:
            return server.stopping or server.watches_dropped != dropped

        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for events in watches.events(server.api.store, call, is_cut):
            for name, subject in events:
                self._send_event(name, subject)
            if not events and self._client_left():
                break
        if is_cut():
            self.close_connection = True
            _close(self.connection)
        else:
            self.wfile.write(b"0\r\n\r\n")

    def _client_left(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable)

    def _send_event(self, name: str, subject: Object) -> None:
        line = json.dumps({"type": name, "object": subject}).encode() + b"\n"
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.flush()

    def _proxy(self, call: Call, body: bytes) -> None:
        """Forward a request to a pod, without the API server's token, as a real server does."""
        address = proxy.address(self.server.api, self.server.node, call)
        target = "/" + call.rest + ("?" + urllib.parse.urlsplit(self.path).query).rstrip("?")
        drop = _HOP_BY_HOP | {"authorization", "host"}
        headers = {name: value for name, value in self.headers.items() if name.lower() not in drop}
        connection = http.client.HTTPConnection(*address, timeout=60)
        try:
            connection.request(self.command, target, body or None, headers)
            response = connection.getresponse()
            content = response.read()
        except OSError as error:
            reason = f"error trying to reach service: dial tcp {address[0]}:{address[1]}: {error.strerror or error}"
            raise status.unavailable(reason) from None
        finally:
            connection.close()
        self.send_response(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _respond_error(self, error: ApiError) -> None:
        headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
        self._respond_bytes(error.code, json.dumps(error.body()).encode(), "application/json", headers)

    def _respond_json(self, code: int, content: Object) -> None:
        self._respond_bytes(code, json.dumps(content).encode(), "application/json")

    def _respond_bytes(self, code: int, content: bytes, media_type: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def _read(api: Api, call: Call) -> Object:
    assert call.kind is not None
    if call.verb == "get":
        return api.get(call.kind, call.namespace, call.name)
    return api.list_objects(
        call.kind,
        call.namespace,
        label_selector=call.query.get("labelSelector", ""),
        field_selector=call.query.get("fieldSelector", ""),
    )


def _decode(body: bytes) -> Object:
    try:
        decoded = json.loads(body)
    except ValueError as error:
        raise status.bad_request(f"the object provided is unrecognized (must be of type JSON): {error}") from None
    if not isinstance(decoded, dict):
        raise status.bad_request("the object provided is unrecognized (must be of type object)")
    return decoded


def _close(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # already closed
