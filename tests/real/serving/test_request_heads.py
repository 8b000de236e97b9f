"""Invalid request heads get 4xx with a message: no 5xx, no reset, no silence. Pipelined requests
are answered in order, regardless of their cost and result."""

import itertools
import json
import socket
import struct
from dataclasses import dataclass

import pytest

from tests.real.serving.raw import Answer, Raw, bearer, request
from tests.served import Served

PREDICT = b"POST /predictions/embedding"
LENGTH = b"Content-Length: 3\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"3\r\nabc\r\n0\r\n\r\n"
APIS = {"inference": "inference_port", "management": "management_port", "metrics": "metrics_port"}


@dataclass(frozen=True)
class Case:
    line: bytes
    status: int
    sentence: str


# Request lines, for any API.
LINES = {
    "the whole server": Case(b"OPTIONS *", 400, "has no path"),
    "a tunnel": Case(b"CONNECT example.org:443", 405, "must be one of DELETE, GET"),
    "a trace": Case(b"TRACE /", 405, "must be one of"),
    "an unknown method": Case(b"BREW /ping", 405, "must be one of"),
    "a method with a zero": Case(b"GET\0 /ping", 400, "is not a token"),
    "no slash": Case(b"GET ping", 400, "has no path"),
    "a path of another kind": Case(b"GET urn:ping", 400, "has no path"),
    "an empty authority": Case(b"GET http://", 400, "has no path"),
    "an invalid escape": Case(b"GET /%zz", 400, "an invalid escape"),
    "half an escape": Case(b"GET /ping%2", 400, "an invalid escape"),
    "a bad escape in the query": Case(b"GET /ping?a=%zz", 400, "an invalid escape"),
    "HTTP/0.9": Case(b"GET /ping ", 400, "is not HTTP/1.1"),
    "HTTP/1.7": Case(b"GET /ping HTTP/1.7", 400, "requires HTTP/1.1"),
    "HTTP/2 with prior knowledge": Case(b"PRI * HTTP/2.0", 400, "requires HTTP/1.1"),
    "no HTTP": Case(b"\x16\x03\x01\x02\x00\x01\x00\x01 \xfc\x03\x03 x", 400, "is not HTTP/1.1"),
    "an endless target": Case(b"GET /" + b"a" * 5000, 414, "request line is too long"),
    "the root": Case(b"GET /", 405, "not allowed"),
    "slashes alone": Case(b"GET ////", 405, "not allowed"),
    "an unknown path": Case(b"GET /nothing", 404, "not found"),
}
# Headers, for the inference API; they precede the body of CHUNKED or LENGTH.
HEADERS = {
    "two ways to state the length": Case(LENGTH + CHUNKED, 400, "both Content-Length and Transfer-Encoding"),
    "the same, the other way round": Case(CHUNKED + LENGTH, 400, "both Content-Length and Transfer-Encoding"),
    "two lengths": Case(LENGTH + b"Content-Length: 4\r\n", 400, "Content-Length"),
    "a length twice": Case(LENGTH + LENGTH, 400, "Content-Length"),
    "a list of lengths": Case(b"Content-Length: 3, 3\r\n", 400, "Content-Length"),
    "a length with a sign": Case(b"Content-Length: +3\r\n", 400, "Content-Length must be one number"),
    "a negative length": Case(b"Content-Length: -3\r\n", 400, "Content-Length must be one number"),
    "a length that is not a number": Case(b"Content-Length: 0x3\r\n", 400, "0x3"),
    "a length that is too large": Case(b"Content-Length: 99999999999999999999\r\n", 400, "99999999999999999999"),
    "a length on the next line": Case(b"Content-Length:\r\n 3\r\n", 400, "is not HTTP/1.1"),
    "an unknown coding": Case(b"Transfer-Encoding: xchunked\r\n", 400, "Transfer-Encoding must be chunked"),
    "two codings": Case(b"Transfer-Encoding: gzip, chunked\r\n", 400, "Transfer-Encoding must be chunked"),
    "a coding twice": Case(CHUNKED + CHUNKED, 400, "Transfer-Encoding must be chunked"),
    "no coding, with a length": Case(b"Transfer-Encoding: identity\r\n" + LENGTH, 400, "must be chunked"),
    "a coding on the next line": Case(b"Transfer-Encoding:\r\n chunked\r\n", 400, "must be chunked"),
    "a space before the colon": Case(b"Content-Length : 3\r\n", 400, "is not HTTP/1.1"),
    "a control character in a name": Case(b"\x01X: 1\r\n" + LENGTH, 400, "is not a token"),
    "no colon": Case(b"nonsense\r\n", 400, "No colon found"),
    "two hosts": Case(b"Host: other\r\n" + LENGTH, 400, "one Host header"),
    "a header that is too large": Case(b"X: " + b"a" * 9000 + b"\r\n", 431, "too large or too many"),
    "too many headers": Case(b"a:b\r\n" * 1000 + LENGTH, 431, "too large or too many"),
    "an unknown expectation": Case(b"Expect: nonsense\r\n" + LENGTH, 417, "Expect must be 100-continue"),
    "an announced large body": Case(b"Expect: 100-continue\r\nContent-Length: 7000000\r\n", 413, "is larger than"),
    "two tokens": Case(b"Authorization: Bearer x\r\n" + LENGTH, 401, "Token Authorization failed"),
}
# Bodies of CHUNKED, for the inference API.
CHUNKED_BODIES = {
    "a chunk size that is not a number": Case(b"zz\r\n", 400, "cannot be read"),
    "a negative chunk size": Case(b"-3\r\nabc\r\n0\r\n\r\n", 400, "cannot be read"),
    "a chunk size that is too large a number": Case(b"fffffffff\r\n", 400, "cannot be read"),
}


def token(stub: Served, api: str) -> bytes:
    return b"" if api == "metrics" else bearer(stub, api)


def send(stub: Served, data: bytes, api: str = "inference") -> list[Answer]:
    with Raw.to(getattr(stub.settings.serving, APIS[api])) as connection:
        return connection.send(data).all_answers()


def check(answers: list[Answer], case: Case) -> None:
    (answer,) = answers
    assert (answer.status, answer.headers["connection"]) == (case.status, "close")
    assert case.sentence in answer.sentence


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", LINES)
def test_invalid_request_line_is_rejected(stub: Served, api: str, name: str) -> None:
    case = LINES[name]
    check(send(stub, request(case.line, token(stub, api)), api), case)


@pytest.mark.parametrize("name", HEADERS)
def test_ambiguous_headers_are_rejected(stub: Served, name: str) -> None:
    case = HEADERS[name]
    body = CHUNKS if b"chunked" in case.line else b"abc"
    check(send(stub, request(PREDICT, bearer(stub) + case.line) + body), case)


@pytest.mark.parametrize("name", CHUNKED_BODIES)
def test_invalid_chunks_are_rejected(stub: Served, name: str) -> None:
    case = CHUNKED_BODIES[name]
    check(send(stub, request(PREDICT, bearer(stub) + CHUNKED) + case.line), case)


def test_request_without_a_host_is_rejected(stub: Served) -> None:
    check(send(stub, b"GET /ping HTTP/1.1\r\n%s\r\n" % bearer(stub)), Case(b"", 400, "one Host header"))


def test_bytes_after_a_rejected_head_are_not_parsed(stub: Served) -> None:
    """Netty 4.1.53 parses the body as the next request after it rejects Expect."""
    hidden = request(b"GET /ping", bearer(stub))
    for expectation in (b"100-continue", b"nonsense"):
        head = b"Expect: %s\r\nContent-Length: 7000000\r\n" % expectation
        (answer,) = send(stub, request(PREDICT, bearer(stub) + head) + hidden)
        assert answer.status in (413, 417)


@pytest.mark.parametrize(("missing", "sent"), [("body", LENGTH + b"\r\nab"), ("head", LENGTH)])
def test_truncated_request_is_rejected(stub: Served, missing: str, sent: bytes) -> None:
    with Raw.to(stub.settings.serving.inference_port) as connection:
        connection.send(b"%s HTTP/1.1\r\nHost: x\r\n%s%s" % (PREDICT, bearer(stub), sent)).end()
        (answer,) = connection.all_answers()
    assert answer.status == 400
    assert answer.sentence.endswith(".")


@pytest.mark.parametrize("api", ["inference", "management"])
@pytest.mark.parametrize("header", [b"", b"Authorization: Bearer x\r\n", b"Authorization: Basic eDp4\r\n"])
def test_missing_token_is_401(stub: Served, api: str, header: bytes) -> None:
    for line in (b"GET /ping", b"GET /models", b"GET /api-description", b"OPTIONS /", b"GET /ready"):
        (answer,) = send(stub, request(line, header), api)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert "Authorization: Bearer TOKEN" in answer.sentence


@pytest.mark.parametrize("api", ["management", "metrics"])
def test_management_and_metrics_apis_accept_no_body(stub: Served, api: str) -> None:
    check(send(stub, request(b"POST /models", token(stub, api), b"{"), api), Case(b"", 413, "accepts no bodies"))


def test_accepts_absolute_urls(stub: Served) -> None:
    with Raw.to(stub.settings.serving.inference_port) as connection:
        for target in (b"http://test/ping", b"HTTPS://test:1/ping", b"/ping?a=b"):
            assert connection.send(request(b"GET " + target, bearer(stub))).answer().status == 200


def test_sends_100_continue_before_the_body(stub: Served) -> None:
    image, _ = stub.parts.smoke_queries()[0]
    head = b"Expect: 100-Continue\r\nContent-Length: %d\r\n" % len(image)
    with Raw.to(stub.settings.serving.inference_port) as connection:
        connection.send(request(PREDICT, bearer(stub) + head))
        assert connection.answer().status == 100
        assert connection.send(image).answer().status == 200
        assert connection.send(request(PREDICT + b" HTTP/1.0", bearer(stub) + head) + image).answer().status == 200


def test_head_response_has_no_body(stub: Served) -> None:
    with Raw.to(stub.settings.serving.inference_port) as connection:
        head = connection.send(request(b"HEAD /ping", bearer(stub))).answer(head=True)
        whole = connection.send(request(b"GET /ping", bearer(stub))).answer()
        assert (head.status, whole.status) == (200, 200)
        assert int(head.headers["content-length"]) == len(whole.body)


KINDS = ("prediction", "ping", "unknown path", "wrong method", "not an image", "too large", "no token", "malformed")
ENDINGS = KINDS[2:]  # an error response closes the connection, with the matching header


def make_request(stub: Served, kind: str) -> bytes:
    token = bearer(stub)
    image, _ = stub.parts.smoke_queries()[0]
    return {
        "prediction": request(PREDICT, token, image),
        "ping": request(b"GET /ping", token),
        "unknown path": request(b"GET /nothing", token),
        "wrong method": request(b"TRACE /ping", token),
        "not an image": request(PREDICT, token, b"nonsense"),
        "too large": request(PREDICT, token, bytes(7_000_000)),
        "no token": request(PREDICT, b"", image),
        "malformed": b"nonsense\r\n\r\n",
    }[kind]


def kind_of(answer: Answer) -> str:
    content = json.loads(answer.body)
    if answer.status == 200:
        return "prediction" if "pred" in content else "ping"
    return {
        (404, "ResourceNotFoundException"): "unknown path",
        (405, "MethodNotAllowed"): "wrong method",
        (400, "BadImage"): "not an image",
        (413, "TooLarge"): "too large",
        (401, "Unauthorized"): "no token",
        (400, "BadRequest"): "malformed",
    }[answer.status, content["type"]]


def orders() -> list[tuple[str, ...]]:
    """All orders of a prediction, a request that needs no worker, and one that closes the
    connection."""
    return [order for ending in ENDINGS for order in itertools.permutations(("prediction", "ping", ending))] + [
        ("prediction", "ping") * 3,
        ("ping", "prediction") * 3,
    ]


def expected_kinds(order: tuple[str, ...]) -> list[str]:
    """All kinds up to the first that closes the connection."""
    ends = [number for number, kind in enumerate(order, start=1) if kind in ENDINGS]
    return list(order[: ends[0]] if ends else order)


@pytest.mark.parametrize("half_closed", [False, True])
@pytest.mark.parametrize("order", orders(), ids=" - ".join)
def test_pipelined_requests_are_answered_in_order(stub: Served, order: tuple[str, ...], half_closed: bool) -> None:
    expected = expected_kinds(order)
    with Raw.to(stub.settings.serving.inference_port) as connection:
        connection.send(b"".join(make_request(stub, kind) for kind in order))
        answers = connection.end().all_answers() if half_closed else [connection.answer() for _ in expected]
    assert [kind_of(answer) for answer in answers] == expected
    assert half_closed or [answer.headers["connection"] for answer in answers] == [
        "close" if kind in ENDINGS else "keep-alive" for kind in expected
    ]


@pytest.mark.parametrize("api", ["management", "metrics"])
def test_other_apis_answer_pipelined_requests_in_order(stub: Served, api: str) -> None:
    port = getattr(stub.settings.serving, f"{api}_port")
    token = bearer(stub, api) if api == "management" else b""
    path, _ = paths = (b"/models/embedding", b"/nothing") if api == "management" else (b"/metrics", b"/nothing")
    with Raw.to(port) as connection:
        connection.send(b"".join(request(b"GET " + other_path, token) for other_path in (path, *paths, path))).end()
        assert [answer.status for answer in connection.all_answers()] == [200, 200, 404]


def test_requests_may_arrive_byte_by_byte(stub: Served) -> None:
    with Raw.to(stub.settings.serving.inference_port) as connection:
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in make_request(stub, "prediction") + make_request(stub, "ping") + make_request(stub, "prediction"):
            connection.send(bytes([byte]))
        assert [kind_of(connection.answer()) for _ in range(3)] == ["prediction", "ping", "prediction"]


def test_hundreds_of_requests_may_be_pipelined(stub: Served) -> None:
    order = ["ping"] * 400 + ["prediction"] * 20 + ["ping"] * 5
    with Raw.to(stub.settings.serving.inference_port) as connection:
        connection.send(b"".join(make_request(stub, kind) for kind in order))
        assert [kind_of(connection.answer()) for _ in order] == order


def test_server_closes_the_connection_on_request(stub: Served) -> None:
    last = request(b"GET /ping", bearer(stub) + b"Connection: close\r\n")
    old = request(b"GET /ping HTTP/1.0", bearer(stub))
    for ending in (last, old):
        with Raw.to(stub.settings.serving.inference_port) as connection:
            first, second = connection.send(
                make_request(stub, "ping") + ending + make_request(stub, "ping")
            ).all_answers()
        assert (first.headers["connection"], second.headers["connection"]) == ("keep-alive", "close")


def test_reset_connections_do_not_affect_other_clients(stub: Served) -> None:
    with Raw.to(stub.settings.serving.inference_port) as other:
        for _ in range(50):
            with Raw.to(stub.settings.serving.inference_port) as resetting:
                resetting.send(make_request(stub, "prediction") * 3)
                resetting.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        assert kind_of(other.send(make_request(stub, "prediction")).answer()) == "prediction"
