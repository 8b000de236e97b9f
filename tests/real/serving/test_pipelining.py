"""Pipelined requests are answered in order, regardless of their cost and result."""

import itertools
import json
import socket
import struct

import pytest

from tests.real.serving.raw import Answer, Raw, bearer, request
from tests.served import Served

PREDICT = b"POST /predictions/embedding"
KINDS = ("prediction", "ping", "unknown path", "wrong method", "not an image", "too large", "no token", "malformed")
ENDINGS = KINDS[2:]  # an error response closes the connection, with the matching header


def make_request(served: Served, kind: str) -> bytes:
    token = bearer(served)
    image, _ = served.parts.smoke_queries()[0]
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


@pytest.mark.parametrize("order", orders(), ids=" - ".join)
def test_pipelined_requests_are_answered_in_order(served: Served, order: tuple[str, ...]) -> None:
    requests = b"".join(make_request(served, kind) for kind in order)
    expected = expected_kinds(order)
    with Raw.to(served.settings.serving.inference_port) as connection:
        connection.send(requests)
        answers = [connection.answer() for _ in expected]
        assert [kind_of(answer) for answer in answers] == expected
        assert [answer.headers["connection"] for answer in answers] == [
            "close" if kind in ENDINGS else "keep-alive" for kind in expected
        ]


@pytest.mark.parametrize("order", orders(), ids=" - ".join)
def test_half_closed_connection_receives_all_responses(served: Served, order: tuple[str, ...]) -> None:
    requests = b"".join(make_request(served, kind) for kind in order)
    with Raw.to(served.settings.serving.inference_port) as connection:
        answers = connection.send(requests).end().all_answers()
    assert [kind_of(answer) for answer in answers] == expected_kinds(order)


@pytest.mark.parametrize("api", ["management", "metrics"])
def test_other_apis_answer_pipelined_requests_in_order(served: Served, api: str) -> None:
    port = getattr(served.settings.serving, f"{api}_port")
    token = bearer(served, api) if api == "management" else b""
    path, _ = paths = (b"/models/embedding", b"/nothing") if api == "management" else (b"/metrics", b"/nothing")
    with Raw.to(port) as connection:
        connection.send(b"".join(request(b"GET " + other_path, token) for other_path in (path, *paths, path))).end()
        assert [answer.status for answer in connection.all_answers()] == [200, 200, 404]


def test_requests_may_arrive_byte_by_byte(served: Served) -> None:
    with Raw.to(served.settings.serving.inference_port) as connection:
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in (
            make_request(served, "prediction") + make_request(served, "ping") + make_request(served, "prediction")
        ):
            connection.send(bytes([byte]))
        assert [kind_of(connection.answer()) for _ in range(3)] == ["prediction", "ping", "prediction"]


def test_hundreds_of_requests_may_be_pipelined(served: Served) -> None:
    order = ["ping"] * 400 + ["prediction"] * 20 + ["ping"] * 5
    with Raw.to(served.settings.serving.inference_port) as connection:
        connection.send(b"".join(make_request(served, kind) for kind in order))
        assert [kind_of(connection.answer()) for _ in order] == order


def test_large_body_may_be_pipelined(served: Served) -> None:
    image, _ = served.parts.smoke_queries()[0]
    large = request(PREDICT, bearer(served), image + bytes(5_000_000))  # bytes after an image are ignored
    with Raw.to(served.settings.serving.inference_port) as connection:
        connection.send(make_request(served, "prediction") + large + make_request(served, "ping"))
        assert [kind_of(connection.answer()) for _ in range(3)] == ["prediction", "prediction", "ping"]


def test_server_closes_the_connection_on_request(served: Served) -> None:
    last = request(b"GET /ping", bearer(served) + b"Connection: close\r\n")
    old = request(b"GET /ping HTTP/1.0", bearer(served))
    for ending in (last, old):
        with Raw.to(served.settings.serving.inference_port) as connection:
            first, second = connection.send(
                make_request(served, "ping") + ending + make_request(served, "ping")
            ).all_answers()
        assert (first.headers["connection"], second.headers["connection"]) == ("keep-alive", "close")


def test_reset_connections_do_not_affect_other_clients(served: Served) -> None:
    with Raw.to(served.settings.serving.inference_port) as other:
        for _ in range(50):
            with Raw.to(served.settings.serving.inference_port) as resetting:
                resetting.send(make_request(served, "prediction") * 3)
                resetting.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        assert kind_of(other.send(make_request(served, "prediction")).answer()) == "prediction"
