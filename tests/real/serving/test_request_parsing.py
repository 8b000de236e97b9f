import base64
import gzip
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evernear.errors import DataError
from evernear.serving.request_parsing import (
    FIELDS,
    RequestError,
    compression,
    decode_base64,
    image_from_fields,
    image_from_json,
)
from evernear.serving.responses import Rejection


@given(st.binary(min_size=1).filter(lambda data: data[:1] not in b"{ \n\r\t" and not compression(data)))
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
    assert decode_base64(text) == image_from_json(body) == image_from_fields({"body": body}) == data


@pytest.mark.parametrize(
    "text", ["***", "AAAAA", "data:image/png,%89PNG", "data:image/png;base64", "data:image/png;base64,*", "A=A=", "ä"]
)
def test_other_text_is_not_base64(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        decode_base64(text)
    with pytest.raises(DataError, match="not base64"):
        image_from_json(json.dumps({"data": text}).encode())


@pytest.mark.parametrize("field", FIELDS)
def test_compressed_body_is_named(field: str) -> None:
    body = gzip.compress(b'{"data": "AAAA"}')
    rejection = image_from_fields({field: body})
    assert isinstance(rejection, Rejection)
    assert rejection.message == "The request's body is compressed with gzip; send it uncompressed."
    with pytest.raises(RequestError, match="compressed with gzip"):
        image_from_json(body)


@pytest.mark.parametrize("field", FIELDS)
def test_multipart_field_is_the_image(field: str) -> None:
    assert image_from_fields({"other": b"x", field: b"\x89PNG"}) == b"\x89PNG"


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


@given(st.dictionaries(st.sampled_from([*FIELDS, "x"]), st.binary()))
def test_any_input_is_an_image_or_rejected(fields: dict[str, bytes]) -> None:
    assert isinstance(image_from_fields(fields), bytes | Rejection)
