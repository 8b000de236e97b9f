import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evernear.serving.request_parsing import FIELDS, image_from_fields
from evernear.serving.responses import Rejection


@given(st.binary(min_size=1).filter(lambda data: data[:1] not in b"{ \n\r\t"))
def test_plain_body_is_the_image(data: bytes) -> None:
    assert image_from_fields({"body": data}) == data


@given(st.binary(min_size=1))
def test_json_may_contain_any_image(data: bytes) -> None:
    body = json.dumps({"data": base64.b64encode(data).decode()}).encode()
    assert image_from_fields({"body": body}) == data
    assert image_from_fields({"body": b"\n " + body}) == data


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
