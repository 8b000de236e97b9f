"""What AWS offers a process without keys: STS, the metadata server of EC2, the container endpoint
of ECS and EKS, and S3 in front of another S3 server.

It checks what the real ones check: methods, headers, versions, the form of names, tokens, and for
S3 the signature, the session token and its expiration.
"""

import http.client
import itertools
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

ROLE = "arn:aws:iam::123456789012:role/evernear"
CONTAINER_PATH = "/v2/credentials/0f1e"
INSTANCE_PATH = "/latest/meta-data/iam/security-credentials/"
_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class IssuedKeys:
    access_key: str
    secret_key: str
    session_token: str
    expiration: datetime

    def as_json(self, name_of_token: str) -> dict[str, str]:
        return {
            "AccessKeyId": self.access_key,
            "SecretAccessKey": self.secret_key,
            name_of_token: self.session_token,
            "Expiration": f"{self.expiration:%Y-%m-%dT%H:%M:%SZ}",
        }


@dataclass
class LoopbackAWS:
    """The server. ``now`` is its clock."""

    s3: str
    """The server behind this one, which need not check keys."""
    url: str = ""
    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    lifetime: timedelta = timedelta(hours=1)
    web_identity: str = "eyJhbGciOi.the-first.signature"
    container_token: str = "the-token-of-the-pod"
    has_instance_role: bool = True
    down: bool = False
    """STS and the metadata servers answer 503."""
    issued: list[IssuedKeys] = field(default_factory=list[IssuedKeys])
    asked: list[str] = field(default_factory=list[str])
    """Method and path of each request for keys."""
    signed_by: list[str] = field(default_factory=list[str])
    """The access key of each request to S3, or an empty string."""
    permanent: dict[str, str] = field(default_factory=dict[str, str])
    """Access keys that never expire, with their secret keys."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def issue(self) -> IssuedKeys:
        number = next(_NUMBERS)
        expiration = (self.now + self.lifetime).replace(microsecond=0)
        keys = IssuedKeys(f"ASIALOOPBACK{number:08}", f"secret-{number:032}", f"session/{number:064}+=", expiration)
        self.issued.append(keys)
        return keys


@contextmanager
def loopback_aws(s3: str) -> Iterator[LoopbackAWS]:
    aws = LoopbackAWS(s3)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"aws": aws}))
    server.daemon_threads = True
    aws.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield aws
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    aws: LoopbackAWS
    body: bytes

    def _handle(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        if path.startswith("/latest/"):
            self._keys(self._instance)
        elif path == CONTAINER_PATH:
            self._keys(self._container)
        elif self.command == "POST" and "Action=AssumeRole" in self.path:
            self._keys(self._sts)
        else:
            self._s3()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _keys(self, answer: Any) -> None:
        self.aws.asked.append(f"{self.command} {urlsplit(self.path).path}")
        if self.aws.down:
            self._send(503, "text/plain", "busy")
        else:
            answer()

    def _instance(self) -> None:
        token = f"metadata-token-of-{self.aws.url}"
        if self.path == "/latest/api/token":
            if self.command != "PUT" or "X-Forwarded-For" in self.headers:
                return self._send(403, "text/html", "")
            ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            return self._send(200, "text/plain", token) if re.fullmatch(r"\d{1,5}", ttl) else self._send(400, "", "")
        if self.command != "GET" or self.headers.get("X-aws-ec2-metadata-token") != token:
            return self._send(401, "text/html", "")
        if not self.aws.has_instance_role:
            return self._send(404, "text/html", "")
        if self.path == INSTANCE_PATH:
            return self._send(200, "text/plain", "node-role")
        if self.path != f"{INSTANCE_PATH}node-role":
            return self._send(404, "text/html", "")
        document = {"Code": "Success", "Type": "AWS-HMAC", "LastUpdated": "2026-01-01T00:00:00Z"}
        return self._send(200, "text/plain", json.dumps(document | self.aws.issue().as_json("Token")))

    def _container(self) -> None:
        if self.command != "GET" or self.headers.get("Authorization") != self.aws.container_token:
            document = {"code": "AccessDeniedException", "message": "bad token"}
            return self._send(400, "application/json", json.dumps(document))
        return self._send(200, "application/json", json.dumps(self.aws.issue().as_json("Token") | {"RoleArn": ROLE}))

    def _sts(self) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        if query.get("Version") != "2011-06-15" or query.get("Action") != "AssumeRoleWithWebIdentity":
            return self._sts_error(400, "InvalidAction", "no such action")
        if not re.fullmatch(r"[\w+=,.@-]{2,64}", query.get("RoleSessionName", "")):
            return self._sts_error(400, "ValidationError", "RoleSessionName")
        if query.get("WebIdentityToken") != self.aws.web_identity:
            return self._sts_error(400, "InvalidIdentityToken", "the token is of another issuer")
        if query.get("RoleArn") != ROLE:
            return self._sts_error(403, "AccessDenied", "Not authorized to perform sts:AssumeRoleWithWebIdentity")
        keys = self.aws.issue()
        fields = "".join(f"<{name}>{value}</{name}>" for name, value in keys.as_json("SessionToken").items())
        body = (
            '<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
            f"<AssumeRoleWithWebIdentityResult><Credentials>{fields}</Credentials></AssumeRoleWithWebIdentityResult>"
            "</AssumeRoleWithWebIdentityResponse>"
        )
        return self._send(200, "text/xml", body)

    def _sts_error(self, status: int, code: str, message: str) -> None:
        namespace = "https://sts.amazonaws.com/doc/2011-06-15/"
        error = f"<Error><Type>Sender</Type><Code>{code}</Code><Message>{message}</Message></Error>"
        self._send(status, "text/xml", f'<ErrorResponse xmlns="{namespace}">{error}</ErrorResponse>')

    def _s3(self) -> None:
        fault = self._fault()
        if fault:
            code = f"<?xml version='1.0'?><Error><Code>{fault}</Code><Message>{fault}</Message></Error>"
            return self._send(400 if fault == "ExpiredToken" else 403, "application/xml", code)
        parts = urlsplit(self.aws.s3)
        connection = http.client.HTTPConnection(parts.netloc, timeout=30)
        try:
            with self.aws.lock:  # moto's operations are not atomic
                connection.request(self.command, self.path, self.body, dict(self.headers))
                response = connection.getresponse()
                body = response.read()
        finally:
            connection.close()
        self.send_response_only(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        length = response.getheader("content-length") if self.command == "HEAD" else str(len(body))
        if response.status != 204:
            self.send_header("Content-Length", length or "0")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        return None

    def _fault(self) -> str:
        """The code of the error, or an empty string."""
        authorization = self.headers.get("Authorization", "")
        match = re.search(
            r"Credential=([^/]+)/(\d{8})/([^/]+)/s3/.*SignedHeaders=([^,]+), ?Signature=(\w+)", authorization
        )
        self.aws.signed_by.append(match[1] if match else "")
        if not match:
            return "AccessDenied" if authorization else ""
        secret, token = self.aws.permanent.get(match[1]), None
        if secret is None:
            keys = next((keys for keys in self.aws.issued if keys.access_key == match[1]), None)
            if keys is None:
                return "InvalidAccessKeyId"
            if self.headers.get("x-amz-security-token") != keys.session_token:
                return "InvalidToken"
            if keys.expiration <= self.aws.now:
                return "ExpiredToken"
            secret, token = keys.secret_key, keys.session_token
        is_valid = self._signature(match[1], secret, token, match[3], match[4].split(";")) == match[5]
        return "" if is_valid else "SignatureDoesNotMatch"

    def _signature(self, access_key: str, secret: str, token: str | None, region: str, signed: list[str]) -> str:
        headers = {name: self.headers[name] for name in signed if name in self.headers}
        request = AWSRequest(self.command, f"http://{self.headers['Host']}{self.path}", headers, self.body)
        parts = urlsplit(self.path)
        request.params = {unquote(k): unquote(v) for k, _, v in (p.partition("=") for p in parts.query.split("&")) if k}
        request.url = f"http://{self.headers['Host']}{unquote(parts.path)}"
        request.context["timestamp"] = self.headers["x-amz-date"]
        auth = S3SigV4Auth(Credentials(access_key, secret, token), "s3", region)
        canonical = "\n".join(
            [
                self.command,
                parts.path,
                "&".join(sorted(p if "=" in p else f"{p}=" for p in parts.query.split("&") if p)),
                "".join(f"{name}:{' '.join((self.headers[name] or '').split())}\n" for name in signed),
                ";".join(signed),
                self.headers["x-amz-content-sha256"],
            ]
        )
        return auth.signature(auth.string_to_sign(request, canonical), request)

    def _send(self, status: int, kind: str, body: str) -> None:
        data = body.encode()
        self.send_response_only(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
