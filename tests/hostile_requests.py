"""Generated requests, most of them malformed, and a client that sends them along with valid
requests."""

import asyncio
import base64
import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from PIL import Image

from tests import heic, hostile
from tests.dataset_images import saved

Headers = tuple[tuple[bytes, bytes], ...]
TIMEOUT_S = 120
BOUNDARY = b"a-boundary"
JSON: Headers = ((b"Content-Type", b"application/json"),)


@dataclass(frozen=True)
class Request:
    """A POST; an empty ``path`` means that of the `Front`."""

    body: bytes
    headers: Headers = ()
    path: bytes = b""


@dataclass(frozen=True)
class Answer:
    """A response. Without one, ``status`` is 0 and ``body`` contains the reason."""

    status: int
    body: bytes
    latency_s: float

    @property
    def sentence(self) -> str:
        return json.loads(self.body)["message"]


def is_chunked(request: Request) -> bool:
    return any(name == b"Transfer-Encoding" for name, _ in request.headers)


@dataclass(frozen=True)
class RequestTarget:
    """A server on loopback, a valid request for it, and a generator of malformed requests."""

    port: int
    path: bytes
    good: Request
    is_right: Callable[[Answer], bool]
    malformed: Callable[[random.Random], Request]
    headers: Headers = ()

    def send(self, requests: Sequence[Request]) -> list[Answer]:
        """Send requests unchanged and concurrently, each on a separate connection."""
        return asyncio.run(self._send_all(requests))

    async def _send_all(self, requests: Sequence[Request]) -> list[Answer]:
        return await asyncio.wait_for(asyncio.gather(*map(self._send, requests)), TIMEOUT_S)

    async def _send(self, request: Request) -> Answer:
        begin_s = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**22)
        headers = (
            (b"Host", b"localhost"),
            (b"Connection", b"close"),
            *([] if is_chunked(request) else [(b"Content-Length", b"%d" % len(request.body))]),
            *self.headers,
            *request.headers,
        )
        head = b"".join(b"%s: %s\r\n" % header for header in headers)
        writer.write(b"POST %s HTTP/1.1\r\n" % (request.path or self.path) + head + b"\r\n" + request.body)
        try:
            status, length = 100, 0
            while status == 100:
                status = int((await reader.readline()).split()[1])
                while (line := await reader.readline()).strip():
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
            return Answer(status, await reader.readexactly(length), time.perf_counter() - begin_s)
        except (OSError, EOFError, IndexError) as fault:
            return Answer(0, repr(fault).encode(), time.perf_counter() - begin_s)
        finally:
            writer.transport.abort()  # the server may have answered without reading the whole body
            with suppress(OSError):
                await writer.wait_closed()


def torchserve(port: int, token: str, image: bytes, pred: str) -> RequestTarget:
    """TorchServe's REST API."""
    return RequestTarget(
        port=port,
        path=b"/predictions/embedding",
        good=Request(image),
        is_right=lambda answer: answer.status == 200 and json.loads(answer.body)["pred"] == pred,
        malformed=malformed_form,
        headers=((b"Authorization", b"Bearer " + token.encode()),),
    )


def prep(port: int, image: bytes, pred: str) -> RequestTarget:
    """The preprocessing server."""
    return RequestTarget(
        port=port,
        path=b"/predict",
        good=json_request({"data": _base64(image)}),
        is_right=lambda answer: answer.status == 200 and json.loads(answer.body)["pred"] == pred,
        malformed=malformed_data,
    )


def kserve(port: int, image: bytes, pred: str) -> RequestTarget:
    """KServe's predictor or transformer."""
    return RequestTarget(
        port=port,
        path=b"/v1/models/embedding:predict",
        good=json_request({"instances": [{"data": _base64(image)}]}),
        is_right=lambda answer: (
            answer.status == 200 and [entry["pred"] for entry in json.loads(answer.body)["predictions"]] == [pred]
        ),
        malformed=malformed_instances,
    )


def with_image(target: RequestTarget, image: bytes) -> Request:
    """Return a valid request with another image."""
    if target.good.body[:1] != b"{":
        return Request(image)
    value = {"data": _base64(image)}
    return json_request(value if target.path == b"/predict" else {"instances": [value]})


def is_refusal(answer: Answer) -> bool:
    """Whether the response is an error message or a prediction."""
    if answer.status == 200:
        return True
    if not 400 <= answer.status < 500:
        return False
    body = json.loads(answer.body)
    return bool(body.get("message") or body.get("error"))


def json_request(value: object) -> Request:
    return Request(json.dumps(value).encode(), JSON)


def form(name: bytes, content: bytes, boundary: bytes = BOUNDARY) -> Request:
    return form_of((name, content), boundary=boundary)


def form_of(*fields: tuple[bytes, bytes], boundary: bytes = BOUNDARY) -> Request:
    part = b'--%s\r\nContent-Disposition: form-data; name="%s"; filename="a.png"\r\n\r\n%s\r\n'
    return Request(
        b"".join(part % (boundary, name, content) for name, content in fields) + b"--%s--\r\n" % boundary,
        ((b"Content-Type", b"multipart/form-data; boundary=" + BOUNDARY),),
    )


def _base64(image: bytes) -> str:
    return base64.b64encode(image).decode()


def picture(mode: str = "L", kind: str = "PNG", size: tuple[int, int] = (40, 30), **options: object) -> bytes:
    return saved(Image.effect_noise(size, 64).convert(mode), kind, **options)


@cache
def real_images() -> tuple[bytes, ...]:
    """Valid images of several formats, to be damaged."""
    return (
        picture(),
        picture("P"),
        picture("RGBA"),
        picture("RGB", "JPEG", (300, 200)),
        picture("RGB", "JPEG", progressive=True),
        picture("CMYK", "JPEG"),
        hostile.png(40, 30, 16, interlaced=True),
        hostile.animated(),
        hostile.progressive(64, 64, 3, 12),
        heic.single(),
        heic.tiled(2, 2, (100, 90)),
    )


@cache
def bombs() -> tuple[bytes, ...]:
    """Small files of images that are too large to decode. Making them takes a second."""
    return tuple(bomb.make() for bomb in hostile.REFUSED.values())


CONTENT_TYPES = (
    b"",
    b"image/png",
    b"application/json",
    b"application/json; charset=utf-16",
    b"application/cloudevents+json",
    b"text/plain; charset=none",
    b"multipart/form-data",
    b"multipart/form-data; boundary=",
    b"multipart/form-data; boundary=" + BOUNDARY,
    b"multipart/form-data; boundary=" + BOUNDARY,
    b"multipart/form-data; boundary=%s; charset=none" % BOUNDARY,
    b"multipart/mixed; boundary=" + BOUNDARY,
    b"application/x-www-form-urlencoded",
    b"application/x-www-form-urlencoded; charset=none",
    b"\xff\xfe",
    b"a" * 300,
)
ODD_HEADERS: tuple[Headers, ...] = (
    (),
    ((b"Content-Encoding", b"gzip"),),
    ((b"Expect", b"100-continue"),),
    ((b"X-Odd", b"\xc3\xa4\xff"),),
    ((b"Accept", b"\xf0\x9f\x98\x80"),),
    ((b"explain", b"True"),),
)


def image(rng: random.Random) -> bytes:
    """A damaged image, a decompression bomb, or data that is not an image."""
    match rng.randrange(8):
        case 0:
            return rng.choice(bombs())
        case 1:
            return junk(rng)
        case 2:
            return _with_header(rng)
        case _:
            return hostile.mutated(rng, rng.choice(real_images()))


def junk(rng: random.Random, max_bytes: int = 24) -> bytes:
    return rng.randbytes(rng.randrange(max_bytes + 1))


def _with_header(rng: random.Random) -> bytes:
    """A PNG with a forged header and a matching checksum."""
    whole = real_images()[0]
    side = rng.choice([1, 600, 20_000])
    size = (rng.randrange(side).to_bytes(4), rng.randrange(side).to_bytes(4))
    kind = bytes([rng.choice([1, 2, 4, 8, 16, 3]), rng.choice([0, 2, 3, 4, 6, 5]), 0, 0, rng.randrange(3)])
    return whole[:8] + hostile.chunk(b"IHDR", b"".join(size) + kind) + whole[33:]


def json_value(rng: random.Random, names: Sequence[str], depth: int = 0) -> Any:
    """Random JSON that contains the names of a protocol."""
    inner = [json_value(rng, names, depth + 1) for _ in range(rng.randrange(3))] if depth < 3 else []
    leaves = [
        None,
        True,
        rng.random(),
        -1e400,
        junk(rng).decode("latin-1"),
        rng.randrange(10**30),
        _base64(real_images()[0]),
    ]
    return rng.choice([dict(zip(rng.choices(names, k=2), inner, strict=False)), inner, rng.choice(leaves)])


def _broken_json(rng: random.Random) -> bytes:
    """Truncated, endlessly nested or non-text JSON."""
    whole = rng.choice([b'{"data": "AAAA"}', b'{"instances": [{"data": "AAAA"}]}', b'{"inputs": []}'])
    match rng.randrange(5):
        case 0:
            return whole[: rng.randrange(len(whole))]
        case 1:
            return rng.choice([b"[", b'{"data":', b'{"instances":[']) * rng.choice([10, 100_000])
        case 2:
            return rng.choice([b'{"data":[', b'{"instances":[', b'{"inputs":[']) + b"{}," * 50_000 + b"{}]}"
        case 3:
            return hostile.mutated(rng, whole)
        case _:
            return whole.decode().encode(rng.choice(["utf-16", "utf-32"]))


def malformed_form(rng: random.Random) -> Request:
    """A malformed request for TorchServe: a body, a form or JSON."""
    match rng.randrange(10):
        case 0 | 1 | 2:
            body = image(rng)
        case 3:
            body = _broken_json(rng)
        case 4:
            body = json.dumps(json_value(rng, ("data", "x"))).encode()
        case 5:
            body = json.dumps({"data": _base64(image(rng))}).encode()
        case 6:
            body = form(b"data", image(rng)).body
        case 7:
            body = form(junk(rng), junk(rng), rng.choice([BOUNDARY, junk(rng)])).body
        case 8:
            body = form(b"image", junk(rng)).body[: rng.randrange(120)]
        case _:
            body = b"data=%" + junk(rng) + b"&=&%%"
    return Request(body, ((b"Content-Type", rng.choice(CONTENT_TYPES)), *rng.choice(ODD_HEADERS)))


def malformed_data(rng: random.Random) -> Request:
    """A malformed request for the preprocessing server."""
    path = rng.choice([b"/predict", b"/predict/label"])
    match rng.randrange(6):
        case 0:
            body = _broken_json(rng)
        case 1:
            body = json.dumps(json_value(rng, ("data", "x"))).encode()
        case 2:
            body = image(rng)
        case _:
            body = json.dumps({"data": _base64(image(rng))}).encode()
    return Request(body, ((b"Content-Type", rng.choice(CONTENT_TYPES[:6])), *rng.choice(ODD_HEADERS)), path)


def malformed_instances(rng: random.Random) -> Request:
    """A malformed request for KServe, by protocol v1 or v2."""
    v1, v2 = b"/v1/models/embedding:predict", b"/v2/models/embedding/infer"
    names = ("instances", "inputs", "data", "name", "shape", "datatype", "parameters", "outputs", "id")
    images = [_base64(image(rng)) for _ in range(rng.randrange(1, 4))]
    path = rng.choice([v1, v2])
    match rng.randrange(7):
        case 0:
            body = _broken_json(rng)
        case 1:
            body = json.dumps(json_value(rng, names)).encode()
        case 2:
            body = image(rng)
        case 3 | 4:
            path, body = v1, json.dumps({"instances": [{"data": entry} for entry in images]}).encode()
        case _:
            tensor = {"name": "images", "datatype": "BYTES", "shape": [len(images)], "data": images}
            if rng.randrange(3) == 0:
                tensor[rng.choice([*tensor])] = json_value(rng, names)
            path, body = v2, json.dumps({"inputs": [tensor]}).encode()
    return Request(body, ((b"Content-Type", rng.choice(CONTENT_TYPES[:6])), *rng.choice(ODD_HEADERS)), path)


def fuzz(target: RequestTarget, seconds: float, batch: int = 24) -> int:
    """Send new bodies for ``seconds``, each batch along with valid requests; return their
    number.

    A failure names the seed of its batch.
    """
    sent, end_s = 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        seed = random.SystemRandom().getrandbits(64)
        rng = random.Random(seed)
        requests = [target.malformed(rng) for _ in range(batch)]
        answers = target.send([*requests, *[target.good] * 8])
        for request, answer in zip(requests, answers, strict=False):
            assert is_refusal(answer), (seed, request, answer)
        assert all(target.is_right(answer) for answer in answers[batch:]), seed
        sent += batch
    return sent
