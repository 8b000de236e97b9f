"""Listings of S3: the forms of a page, and folders that are listed at the same time."""

import re
import threading
import time
from collections.abc import Callable, Iterable
from xml.etree.ElementTree import ParseError

import pytest

from evernear.common.store import open_store, s3_connection
from evernear.common.store.s3_connection import S3Connection, _parse_page
from evernear.errors import TransientStoreError

TIME = "<LastModified>2026-11-26T10:00:00.000Z</LastModified>"
USUAL = f"<Contents><Key>a%20b/%2B.png</Key>{TIME}<ETag>&quot;0f-2&quot;</ETag><Size>7</Size></Contents>"
FORMS = {
    "AWS": USUAL.replace("</Size>", "</Size><StorageClass>STANDARD</StorageClass>"),
    "quotes as numbers": USUAL.replace("&quot;", "&#34;"),
    "plain quotes": USUAL.replace("&quot;", '"'),
    "no quotes": USUAL.replace("&quot;", ""),
    "no etag": USUAL.replace("<ETag>&quot;0f-2&quot;</ETag>", ""),
    "empty etag": USUAL.replace("&quot;0f-2&quot;", ""),
    "owner": USUAL.replace("</Size>", "</Size><Owner><ID>x</ID></Owner>"),
    "other order": USUAL.replace(f"</Key>{TIME}", "</Key>").replace("</Size>", f"</Size>{TIME}"),
    "line breaks": USUAL.replace("><", ">\n  <"),
    "ampersand": USUAL.replace("a%20b", "a&amp;b&#39;"),
    "comment": USUAL.replace("%20", "<!-- -->"),
    "several": USUAL * 3,
    "usual and other": USUAL + USUAL.replace("<ETag>&quot;0f-2&quot;</ETag>", "").replace("a%20b", "b") + USUAL,
}


def page(contents: str, more: str = "") -> bytes:
    text = '<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    return f"{text}<EncodingType>url</EncodingType>{contents}{more}</ListBucketResult>".encode()


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_a_page_are_read_as_xml(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>a+b</NextContinuationToken>"
    data = page(FORMS[form], more + "<CommonPrefixes><Prefix>c%2B/</Prefix></CommonPrefixes>")
    read = _parse_page(data)
    monkeypatch.setattr(s3_connection, "_OBJECT", re.compile("(?!)"))
    assert read == _parse_page(data)
    assert len(read.objects) == FORMS[form].count("<Key>")
    assert (read.folders, read.next_token) == (["c+/"], "a+b")


@pytest.mark.parametrize(
    "data",
    [
        page(USUAL)[:-1],
        page(USUAL)[:-40],
        page(USUAL.replace("7", "x")),
        page(USUAL.replace("</Key>", "")),
        page(USUAL.replace("a%20b", "a&b")),
        page(USUAL.replace("a%20b", "\x01")),
        page(USUAL).replace(b"%20", b"\xff"),
    ],
)
def test_damaged_page_is_rejected(data: bytes) -> None:
    with pytest.raises((ParseError, ValueError)):
        _parse_page(data)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterable[str], str], list[str]]:
    """Serve the names of a bucket, two in each page. The requests for the folder
    ``failing`` fail.
    """
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")

    def serve(names: Iterable[str], failing: str = "") -> list[str]:
        def answer(self: S3Connection, bucket: str, prefix: str, token: str = "", delimiter: str = "") -> bytes:
            time.sleep(0.002 if prefix > "5" else 0.01)  # later folders answer first
            if prefix and prefix == failing:
                raise ValueError("no listing")
            inside = sorted(name for name in names if name.startswith(prefix))
            if delimiter:
                folders = dict.fromkeys(name.partition("/")[0] for name in inside if "/" in name)
                prefixes = "".join(f"<CommonPrefixes><Prefix>{name}/</Prefix></CommonPrefixes>" for name in folders)
                return page("", prefixes)
            start = int(token or 0)
            shown = inside[start : start + 2]
            next_token = f"<NextContinuationToken>{start + 2}</NextContinuationToken>"
            more = f"<IsTruncated>true</IsTruncated>{next_token}" if inside[start + 2 :] else ""
            return page("".join(USUAL.replace("a%20b/%2B.png", name) for name in shown), more)

        monkeypatch.setattr(S3Connection, "_page", answer)
        return sorted(names)

    return serve


NAMES = [f"{folder}/{number:02}.png" for folder in range(10) for number in range(11)]


def test_folders_listed_at_the_same_time_are_in_order(serve: Callable[..., list[str]]) -> None:
    names = serve(NAMES)
    assert [info.key for info in open_store("s3://names").list("")] == names


def test_error_in_a_folder_ends_all_threads(serve: Callable[..., list[str]]) -> None:
    before, listed = threading.active_count(), list[str]()
    serve(NAMES, "4/")
    listing = open_store("s3://names").list("")
    with pytest.raises(TransientStoreError, match="no listing"):
        listed.extend(info.key for info in listing)
    assert listed == [name for name in NAMES if name < "4"]
    assert threading.active_count() == before


def test_abandoned_listing_ends_all_threads(serve: Callable[..., list[str]]) -> None:
    before = threading.active_count()
    serve(NAMES)
    listing = open_store("s3://names").list("")
    assert next(listing).key == "0/00.png"
    del listing
    assert threading.active_count() == before
