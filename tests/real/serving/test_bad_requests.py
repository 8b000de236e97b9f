"""Every request gets a prediction, or 4xx with a message, and does not affect the worker or other
requests."""

import asyncio
import base64
import gzip
import json
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from evernear.data.preprocess import Preprocessing
from evernear.errors import DataError, PredictionRejectedError
from evernear.release.archive_reader import ReleaseParts
from evernear.serving.client import Target
from evernear.serving.client.grpc import AsyncGrpcTransport
from evernear.serving.decoding import decode_image, inspect_image
from evernear.serving.endpoints import read_key
from evernear.serving.request_parsing import (
    FIELDS,
    RequestError,
    compression,
    decode_base64,
    image_from_body,
    image_from_fields,
    images_from_fields,
)
from evernear.serving.responses import MESSAGE_MAX_IMAGES, PIXELS_FIELD, PREPROCESSING_FIELD, Rejection
from tests import heic, hostile
from tests.hostile_requests import Request, RequestTarget, form, form_of, is_refusal, json_request, picture, torchserve
from tests.served import Served

IN_FLIGHT = 64
ROUNDS = 40


@pytest.fixture(scope="module")
def target(served: Served) -> RequestTarget:
    image, query = served.parts.smoke_queries()[0]
    token = read_key(served.home, "inference")
    return torchserve(served.settings.serving.inference_port, token, image, query.pred)


def with_header(image: bytes, width: int, height: int) -> bytes:
    """A PNG with a forged header and a matching checksum."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return image[:8] + hostile.chunk(b"IHDR", header) + image[33:]


PNG, JPEG = picture(), picture("RGB", "JPEG")
CHUNK = b"%x\r\n%s\r\n" % (1_000_000, bytes(1_000_000))
ACCEPTED = {
    "gray": Request(PNG),
    "color": Request(JPEG),
    "16 bits": Request(hostile.png(40, 30, 16)),
    "WebP": Request(picture("RGB", "WEBP")),
    "HEIC": Request(heic.tiled(2, 2, (120, 90))),
    "CMYK": Request(picture("CMYK", "JPEG")),
    "palette": Request(picture("P")),
    "alpha": Request(picture("RGBA")),
    "alpha in gray": Request(picture("LA")),
    "one bit": Request(picture("1")),
    "form": form(b"data", PNG),
    "form with another field": form(b"image", PNG),
    "image/png": Request(PNG, ((b"Content-Type", b"image/png"),)),
    "image as JSON": Request(PNG, ((b"Content-Type", b"application/json"),)),
    "image as text": Request(PNG, ((b"Content-Type", b"text/plain"),)),
    "JSON without a type": Request(json.dumps({"data": base64.b64encode(PNG).decode()}).encode()),
    "as curl --data-binary sends it": Request(PNG, ((b"Content-Type", b"application/x-www-form-urlencoded"),)),
    "JSON as curl -d sends it": Request(
        json.dumps({"data": base64.b64encode(PNG).decode()}).encode(),
        ((b"Content-Type", b"application/x-www-form-urlencoded"),),
    ),
    "JSON": json_request({"data": base64.b64encode(PNG).decode()}),
}
REFUSED = {
    "not an image": (Request(b"This is no image."), 400, "is not a PNG, JPEG, WebP or HEIC image"),
    "another format": (Request(picture("RGB", "GIF")), 400, "is not a PNG, JPEG, WebP or HEIC image"),
    "nothing": (Request(b""), 400, "is empty"),
    "truncated PNG": (Request(PNG[: len(PNG) // 2]), 400, "is a broken image"),
    "truncated JPEG": (Request(JPEG[: len(JPEG) // 2]), 400, "is a broken image"),
    "bomb": (Request(with_header(PNG, 60_000, 60_000)), 400, "is too large"),
    "bomb within Pillow's bound": (Request(with_header(PNG, 8_000, 8_000)), 400, "is too large"),
    "animated": (Request(hostile.animated()), 400, "is animated"),
    "wrong field": (form(b"picture", PNG), 400, 'a multipart field "data"'),
    "empty field": (form(b"data", b""), 400, "is empty"),
    "two images": (form_of((b"data", PNG), (b"image", JPEG)), 400, "several images or files; send one image"),
    "an image twice": (form_of((b"data", PNG), (b"data", PNG)), 400, "several images or files"),
    "another file": (form_of((b"data", PNG), (b"second", JPEG)), 400, "several images or files"),
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
    "URL-encoded form": (
        Request(b"data=%zz", ((b"Content-Type", b"application/x-www-form-urlencoded"),)),
        400,
        "is not a PNG, JPEG, WebP or HEIC image",
    ),
    "bad base64": (json_request({"data": "*" * 40}), 400, "not JSON with base64"),
    "bad JSON": (Request(b'{"data": "'), 400, "not JSON with base64"),
    "JSON without data": (json_request({"image": "AAAA"}), 400, 'no text under "data"'),
    "7 MB": (Request(PNG + bytes(7_000_000)), 413, "is larger than 6553500 bytes"),
    "7 MB in chunks": (Request(7 * CHUNK + b"0\r\n\r\n", ((b"Transfer-Encoding", b"chunked"),)), 413, "is larger than"),
    "7 MB announced": (
        Request(bytes(7_000_000), ((b"Expect", b"100-continue"),)),
        413,
        "is larger than 6553500 bytes",
    ),
}


def test_json_without_an_image_is_rejected_cheaply(target: RequestTarget) -> None:
    bodies = [b'{"data": [' + b"{}," * 2_000_000 + b"{}]}", b'{"x": ' + b"[" * 6_000_000]
    for answer in target.send([Request(body) for body in bodies]):
        assert answer.status == 400, answer.body


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepts_every_kind_of_image(target: RequestTarget, name: str) -> None:
    (answer,) = target.send([ACCEPTED[name]])
    assert answer.status == 200, answer.body
    assert "pred" in json.loads(answer.body)


@pytest.mark.parametrize("name", REFUSED)
def test_bad_request_is_rejected_alone_with_a_message(served: Served, target: RequestTarget, name: str) -> None:
    request, status, sentence = REFUSED[name]
    image, query = served.parts.smoke_queries()[0]
    answers = target.send([Request(image), request, Request(image)] * 4)
    for number, answer in enumerate(answers):
        if number % 3 == 1:
            assert answer.status == status, answer.body
            assert sentence in answer.sentence
            assert answer.sentence.endswith(".")
        else:
            assert answer.status == 200, answer.body
            assert json.loads(answer.body)["pred"] == query.pred


@pytest.mark.slow
def test_survives_two_thousand_malformed_requests_without_5xx(served: Served, target: RequestTarget) -> None:
    workers = served.management.describe("embedding").workers
    sent: set[Request] = set()

    @settings(
        max_examples=ROUNDS,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # shrinking a failure would repeat as many rounds
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**62))
    def throw(seed: int) -> None:
        rng = random.Random(seed)
        requests = [target.malformed(rng) for _ in range(IN_FLIGHT - 4)]
        answers = target.send([*requests, *[target.good] * 4])
        for request, answer in zip(requests, answers, strict=False):
            assert is_refusal(answer), (request, answer)
        assert all(target.is_right(answer) for answer in answers[-4:])
        sent.update(requests)

    throw()
    assert len(sent) >= 2000
    assert served.management.describe("embedding").workers == workers


@given(st.binary(min_size=1).filter(lambda data: data[:1] not in b"{[ \n\r\t" and not compression(data)))
def test_plain_body_is_the_image(data: bytes) -> None:
    assert image_from_fields({"body": data}) == data


@given(st.binary(min_size=1))
def test_json_may_contain_any_image(data: bytes) -> None:
    body = json.dumps({"data": base64.b64encode(data).decode()}).encode()
    assert image_from_fields({"body": body}) == data
    assert image_from_fields({"body": b"\n " + body}) == data


def data_uri(text: str) -> str:
    return f"data:image/png;base64,{text}"


def wrapped(text: str) -> str:
    return "\r\n".join(text[at : at + 76] for at in range(0, len(text), 76)) + "\n"


def url_safe(text: str) -> str:
    return text.translate(str.maketrans("+/", "-_")).rstrip("=")


@pytest.mark.parametrize("form", [data_uri, wrapped, url_safe, str.strip, lambda text: data_uri(wrapped(text))])
@given(data=st.binary(min_size=1, max_size=400))
def test_base64_is_read_as_clients_write_it(form: Callable[[str], str], data: bytes) -> None:
    text = form(base64.b64encode(data).decode())
    body = json.dumps({"data": text}).encode()
    assert decode_base64(text) == image_from_body("", body) == image_from_fields({"body": body}) == data


@pytest.mark.parametrize(
    "text", ["***", "AAAAA", "data:image/png,%89PNG", "data:image/png;base64", "data:image/png;base64,*", "A=A=", "ä"]
)
def test_other_text_is_not_base64(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        decode_base64(text)
    with pytest.raises(DataError, match="not base64"):
        image_from_body("application/json", json.dumps({"data": text}).encode())


def test_one_of_several_images_is_not_answered_alone() -> None:
    rejection = image_from_fields({"data": PNG, "image": JPEG})  # as a gRPC request may send them
    assert isinstance(rejection, Rejection)
    assert (rejection.code, rejection.type) == (400, "ManyImages")


@pytest.mark.parametrize("field", FIELDS)
def test_compressed_body_is_named(field: str) -> None:
    body = gzip.compress(b'{"data": "AAAA"}')
    rejection = image_from_fields({field: body})
    assert isinstance(rejection, Rejection)
    assert rejection.message == "The request's body is compressed with gzip; send it uncompressed."
    with pytest.raises(RequestError, match="compressed with gzip"):
        image_from_body("image/png", body)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "has no image"),
        ({"picture": b"x"}, "has no image"),
        ({"body": b""}, "is empty"),
        ({"body": b"{"}, "not JSON with base64"),
        ({"body": b'{"data": "***"}'}, "not JSON with base64"),
        ({"body": b'{"data": "\xc3\xa4"}'}, "not JSON with base64"),
        ({"body": b'{"data": "\xff"}'}, "not JSON with base64"),
        ({"body": b'{"image": "AA=="}'}, 'no text under "data"'),
        ({"body": b'{"data": 3}'}, 'no text under "data"'),
        ({"body": b'{"data": null}'}, 'no text under "data"'),
        ({"body": b" [1]"}, 'no text under "data"'),
        ({"body": b'{"a":' * 100_000}, "not JSON with base64"),
    ],
)
def test_request_without_an_image_is_rejected_with_a_message(fields: dict[str, bytes], sentence: str) -> None:
    refusal = image_from_fields(fields)
    assert isinstance(refusal, Rejection)
    assert refusal.code == 400
    assert sentence in refusal.message
    assert refusal.message.endswith(".")


def pixel_fields(shape: Preprocessing, pixels: bytes) -> dict[str, bytes]:
    return {PIXELS_FIELD: pixels, PREPROCESSING_FIELD: shape.model_dump_json().encode()}


def test_pixels_are_several_images(parts: ReleaseParts) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (MESSAGE_MAX_IMAGES, 8, 8, 1), dtype=np.uint8)
    for count in (1, 2, MESSAGE_MAX_IMAGES):
        fields = pixel_fields(parts.manifest.preprocessing, pixels[:count].tobytes())
        assert np.array_equal(images_from_fields(fields, parts.manifest), pixels[:count])
    assert images_from_fields({"body": PNG}, parts.manifest) == [PNG]


@pytest.mark.parametrize("size", [0, 1, 63, 65, 64 * (MESSAGE_MAX_IMAGES + 1), 64 * MESSAGE_MAX_IMAGES - 1])
def test_other_sizes_are_not_pixels(parts: ReleaseParts, size: int) -> None:
    (refusal,) = images_from_fields(pixel_fields(parts.manifest.preprocessing, bytes(size)), parts.manifest)
    assert isinstance(refusal, Rejection)
    assert refusal.message == f"{size} bytes are not the pixels of 1 to 32 images of 8 x 8 x 1 bytes."


@pytest.mark.parametrize("change", [{"height_px": 4, "width_px": 16}, {"resize": "crop"}, {"bit_depth": 12}])
def test_pixels_with_the_preprocessing_of_another_release_are_refused(
    parts: ReleaseParts, change: dict[str, object]
) -> None:
    """Although they have the right size."""
    other = pixel_fields(parts.manifest.preprocessing.model_copy(update=change), bytes(64))
    for fields in (other, {PIXELS_FIELD: bytes(64)}, other | {PREPROCESSING_FIELD: b"\xff"}):
        (refusal,) = images_from_fields(fields, parts.manifest)
        assert isinstance(refusal, Rejection)
        assert (refusal.code, refusal.version) == (409, parts.manifest.version)


def test_refused_pixels_do_not_affect_other_requests(served: Served) -> None:
    shape, target = served.manifest.preprocessing, Target.local(served.settings, "grpc")
    image, query = served.parts.smoke_queries()[0]
    pixels = decode_image(inspect_image(image, 64), shape).tobytes()
    right, other = shape.model_dump_json().encode(), shape.model_copy(update={"resize": "crop"}).model_dump_json()

    async def ask() -> list[Any]:
        transport = AsyncGrpcTransport(target)
        try:
            return await asyncio.gather(
                transport.predict_pixels([pixels] * MESSAGE_MAX_IMAGES, right, [b""] * MESSAGE_MAX_IMAGES),
                transport.predict_pixels([pixels[1:]], right, [b""]),
                transport.predict_pixels([pixels], other.encode(), [b""]),
                transport.predict(image, None),
                return_exceptions=True,
            )
        finally:
            await transport.close()

    for _ in range(4):
        predictions, short, of_another, file = asyncio.run(ask())
        assert {prediction.pred for prediction in predictions} == {query.pred}
        assert len({prediction.id for prediction in predictions}) == MESSAGE_MAX_IMAGES
        assert file.pred == query.pred
        assert isinstance(short, PredictionRejectedError)
        assert short.version == ""
        assert "63 bytes are not the pixels" in str(short)
        assert isinstance(of_another, PredictionRejectedError)
        assert of_another.version == served.manifest.version


@given(st.dictionaries(st.sampled_from([*FIELDS, "x"]), st.binary()))
def test_any_input_is_an_image_or_rejected(fields: dict[str, bytes]) -> None:
    assert isinstance(image_from_fields(fields), bytes | Rejection)
