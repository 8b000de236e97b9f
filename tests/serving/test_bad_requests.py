"""Whatever is sent, the answer is a prediction or 4xx with a sentence; the worker and its neighbours never notice."""

import asyncio
import base64
import json
import random
import struct
import zlib
from dataclasses import dataclass
from io import BytesIO

import hostile
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from served import Served

from evernear.serving.connection import read_key

IN_FLIGHT = 64
ROUNDS = 40
BOUNDARY = b"a-boundary"


@dataclass(frozen=True)
class Request:
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    @property
    def sentence(self) -> str:
        return json.loads(self.body)["message"]


class Sender:
    """Sends requests as they are, many at once, each on a connection of its own."""

    def __init__(self, served: Served) -> None:
        self._port = served.settings.serving.inference_port
        self._key = read_key(served.home, "inference").encode()

    def send(self, requests: list[Request]) -> list[Answer]:
        return asyncio.run(self._send_all(requests))

    async def _send_all(self, requests: list[Request]) -> list[Answer]:
        return await asyncio.wait_for(asyncio.gather(*map(self._send, requests)), 120)

    async def _send(self, request: Request) -> Answer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        headers = (
            (b"Host", b"localhost"),
            (b"Authorization", b"Bearer " + self._key),
            (b"Connection", b"close"),
            (b"Content-Length", b"%d" % len(request.body)),
            *request.headers,
        )
        head = b"".join(b"%s: %s\r\n" % header for header in headers)
        writer.write(b"POST /predictions/embedding HTTP/1.1\r\n" + head + b"\r\n" + request.body)
        try:
            status, length = 100, 0
            while status == 100:
                status = int((await reader.readline()).split()[1])
                while (line := await reader.readline()).strip():
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
            return Answer(status, await reader.readexactly(length))
        except (OSError, EOFError, IndexError) as fault:
            return Answer(0, repr(fault).encode())
        finally:
            writer.close()


@pytest.fixture(scope="module")
def sender(served: Served) -> Sender:
    return Sender(served)


def picture(mode: str = "L", kind: str = "PNG", size: tuple[int, int] = (40, 30), **options: object) -> bytes:
    buffer = BytesIO()
    Image.effect_noise(size, 64).convert(mode).save(buffer, format=kind, **options)
    return buffer.getvalue()


def sixteen_bits() -> bytes:
    buffer = BytesIO()
    Image.effect_noise((40, 30), 64).convert("I").point(lambda v: v * 256).convert("I;16").save(buffer, format="PNG")
    return buffer.getvalue()


def animated() -> bytes:
    frames = [Image.new("L", (8, 8), shade) for shade in (0, 128, 255)]
    buffer = BytesIO()
    frames[0].save(buffer, format="PNG", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


def with_header(image: bytes, width: int, height: int, depth: int = 8, colours: int = 0) -> bytes:
    """A PNG whose header says something else, with a checksum that agrees."""
    header = struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0)
    return image[:16] + header + struct.pack(">I", zlib.crc32(b"IHDR" + header)) + image[33:]


def form(name: bytes, content: bytes, boundary: bytes = BOUNDARY) -> Request:
    body = b'--%s\r\nContent-Disposition: form-data; name="%s"; filename="a.png"\r\n\r\n' % (boundary, name)
    return Request(
        body + content + b"\r\n--%s--\r\n" % boundary,
        ((b"Content-Type", b"multipart/form-data; boundary=" + BOUNDARY),),
    )


def json_request(value: object) -> Request:
    return Request(json.dumps(value).encode(), ((b"Content-Type", b"application/json"),))


PNG, JPEG = picture(), picture("RGB", "JPEG")
TAKEN = {
    "grey": Request(PNG),
    "colour": Request(JPEG),
    "16 bits": Request(sixteen_bits()),
    "CMYK": Request(picture("CMYK", "JPEG")),
    "palette": Request(picture("P")),
    "alpha": Request(picture("RGBA")),
    "alpha in grey": Request(picture("LA")),
    "one bit": Request(picture("1")),
    "form": form(b"data", PNG),
    "JSON": json_request({"data": base64.b64encode(PNG).decode()}),
}
REFUSED = {
    "not an image": (Request(b"This is no image."), 400, "is not a PNG or JPEG image"),
    "another format": (Request(picture("RGB", "GIF")), 400, "is not a PNG or JPEG image"),
    "nothing": (Request(b""), 400, "is empty"),
    "truncated PNG": (Request(PNG[: len(PNG) // 2]), 400, "is a broken image"),
    "truncated JPEG": (Request(JPEG[: len(JPEG) // 2]), 400, "is a broken image"),
    "bomb": (Request(with_header(PNG, 60_000, 60_000)), 400, "is too large"),
    "bomb within Pillow's bound": (Request(with_header(PNG, 8_000, 8_000)), 400, "is too large"),
    "animated": (Request(animated()), 400, "is animated"),
    "wrong field": (form(b"picture", PNG), 400, 'a multipart field "data"'),
    "empty field": (form(b"data", b""), 400, "is empty"),
    "unknown charset": (
        Request(PNG, ((b"Content-Type", b"multipart/form-data; boundary=x; charset=none"),)),
        400,
        "form cannot be read",
    ),
    "empty boundary": (
        Request(PNG, ((b"Content-Type", b"multipart/form-data; boundary="),)),
        400,
        "form cannot be read",
    ),
    "bad escape": (
        Request(b"data=%zz", ((b"Content-Type", b"application/x-www-form-urlencoded"),)),
        400,
        "form cannot be read",
    ),
    "bad base64": (json_request({"data": "*" * 40}), 400, "no JSON with base64"),
    "bad JSON": (Request(b'{"data": "'), 400, "no JSON with base64"),
    "JSON without data": (json_request({"image": "AAAA"}), 400, 'no text under "data"'),
    "7 MB": (Request(PNG + bytes(7_000_000)), 413, "is larger than 6553500 bytes"),
    "7 MB announced": (
        Request(bytes(7_000_000), ((b"Expect", b"100-continue"),)),
        413,
        "is larger than 6553500 bytes",
    ),
}


@pytest.mark.parametrize("name", hostile.REFUSED)
def test_a_bomb_is_refused_alone_in_its_batch(served: Served, sender: Sender, name: str) -> None:
    bomb = hostile.REFUSED[name]
    image, query = served.parts.smoke_queries()[0]
    bomb_answer, *good = sender.send([Request(bomb.make()), *[Request(image)] * 15])
    assert bomb_answer.status == 400, bomb_answer.body
    assert bomb.sentence in bomb_answer.sentence
    assert [json.loads(answer.body)["pred"] for answer in good] == [query.pred] * 15


def test_json_of_anything_but_an_image_is_not_built(sender: Sender) -> None:
    bodies = [b'{"data": [' + b"{}," * 2_000_000 + b"{}]}", b'{"x": ' + b"[" * 6_000_000]
    for answer in sender.send([Request(body) for body in bodies]):
        assert answer.status == 400, answer.body


@pytest.mark.parametrize("name", TAKEN)
def test_every_kind_of_png_and_jpeg_is_taken(sender: Sender, name: str) -> None:
    (answer,) = sender.send([TAKEN[name]])
    assert answer.status == 200, answer.body
    assert "pred" in json.loads(answer.body)


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_request_is_refused_with_a_sentence_and_alone(served: Served, sender: Sender, name: str) -> None:
    request, status, sentence = REFUSED[name]
    image, query = served.parts.smoke_queries()[0]
    answers = sender.send([Request(image), request, Request(image)] * 4)
    for number, answer in enumerate(answers):
        if number % 3 == 1:
            assert answer.status == status, answer.body
            assert sentence in answer.sentence
            assert answer.sentence.endswith(".")
        else:
            assert answer.status == 200, answer.body
            assert json.loads(answer.body)["pred"] == query.pred


def test_a_body_of_unknown_length_that_grows_too_large_is_refused(sender: Sender) -> None:
    chunk = b"%x\r\n%s\r\n" % (1_000_000, bytes(1_000_000))
    request = Request(chunk * 7 + b"0\r\n\r\n", ((b"Transfer-Encoding", b"chunked"),))
    (answer,) = sender.send([request])
    assert answer.status == 413
    assert "is larger than" in answer.sentence


REAL = (PNG, JPEG, sixteen_bits(), animated(), picture("P"), picture("RGBA"))
CONTENT_TYPES = (
    b"",
    b"image/png",
    b"application/json",
    b"application/json; charset=utf-16",
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
ODD_HEADERS = (
    (),
    ((b"Content-Encoding", b"gzip"),),
    ((b"Expect", b"100-continue"),),
    ((b"X-Odd", b"\xc3\xa4\xff"),),
    ((b"Accept", b"\xf0\x9f\x98\x80"),),
    ((b"explain", b"True"),),
)


def mutated(dice: random.Random) -> bytes:
    """A real image with a fault in it, or more than one."""
    image = bytearray(dice.choice(REAL))
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(image)) if image else 0
        match dice.choice(["flip", "cut", "drop", "repeat", "insert", "head"]):
            case "flip" if image:
                image[at] ^= 1 << dice.randrange(8)
            case "cut":
                del image[at:]
            case "drop":
                del image[at : at + dice.randrange(1, 64)]
            case "repeat":
                image[at:at] = image[at : at + dice.randrange(1, 64)]
            case "head":
                depth, colours = dice.choice([1, 2, 4, 8, 16, 3]), dice.choice([0, 2, 3, 4, 6, 5])
                image = bytearray(with_header(PNG, dice.randrange(600), dice.randrange(600), depth, colours))
            case _:
                image[at:at] = junk(dice, 64)
    return bytes(image)


def junk(dice: random.Random, most: int = 24) -> bytes:
    return dice.randbytes(dice.randrange(most + 1))


def json_value(dice: random.Random, depth: int = 0) -> object:
    inner = [json_value(dice, depth + 1) for _ in range(dice.randrange(3))] if depth < 3 else []
    leaves = [None, True, dice.random(), -1e400, junk(dice).decode("latin-1"), dice.randrange(10**30)]
    return dice.choice([dict(zip(("data", "x"), inner, strict=False)), inner, dice.choice(leaves)])


def body(dice: random.Random) -> bytes:
    match dice.randrange(10):
        case 0 | 1 | 2:
            return mutated(dice)
        case 3:
            return junk(dice)
        case 4:
            return json.dumps(json_value(dice)).encode()
        case 5:
            return json.dumps({"data": base64.b64encode(dice.choice([junk, mutated])(dice)).decode()}).encode()
        case 6:
            return form(b"data", mutated(dice)).body
        case 7:
            return form(junk(dice), junk(dice), dice.choice([BOUNDARY, junk(dice)])).body
        case 8:
            return form(b"image", junk(dice)).body[: dice.randrange(120)]
        case _:
            return b"data=%" + junk(dice) + b"&=&%%"


def malformed(seed: int) -> Request:
    dice = random.Random(seed)
    return Request(body(dice), ((b"Content-Type", dice.choice(CONTENT_TYPES)), *dice.choice(ODD_HEADERS)))


def test_two_thousand_malformed_requests_cost_no_worker_and_no_5xx(served: Served, sender: Sender) -> None:
    image, query = served.parts.smoke_queries()[0]
    workers = served.management.describe("embedding").workers
    sent: set[Request] = set()

    @settings(
        max_examples=ROUNDS,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # to make a round smaller would take as many rounds again
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**62))
    def throw(seed: int) -> None:
        requests = [malformed(IN_FLIGHT * seed + number) for number in range(IN_FLIGHT - 4)]
        answers = sender.send([*requests, *[Request(image)] * 4])
        for request, answer in zip(requests, answers, strict=False):
            assert answer.status == 200 or (400 <= answer.status < 500 and answer.sentence), (request, answer)
        for answer in answers[-4:]:
            assert json.loads(answer.body)["pred"] == query.pred
        sent.update(requests)

    throw()
    assert len(sent) >= 2000
    assert served.management.describe("embedding").workers == workers
