"""Listings of S3: their pages, and folders that are listed at the same time."""

import threading
from collections.abc import Callable, Iterable
from xml.etree.ElementTree import ParseError

import pytest

from evernear.common.store import open_store
from evernear.common.store.s3_connection import S3Connection, _parse_page
from evernear.errors import TransientStoreError

TIME = "<LastModified>2026-11-26T10:00:00.000Z</LastModified>"
USUAL = f"<Contents><Key>a%20b/%2B.png</Key>{TIME}<ETag>&quot;0f-2&quot;</ETag><Size>7</Size></Contents>"


def page(contents: str, more: str = "") -> bytes:
    text = '<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    return f"{text}<EncodingType>url</EncodingType>{contents}{more}</ListBucketResult>".encode()


def test_pages_are_read_with_the_elements_of_every_server() -> None:
    """S3 adds checksums to the objects, and some servers add owners."""
    checksum = "<ChecksumAlgorithm>CRC64NVME</ChecksumAlgorithm><ChecksumType>FULL_OBJECT</ChecksumType><Size>"
    other = (
        USUAL.replace("<Size>", checksum).replace("a%20b", "c").replace("</Size>", "</Size><Owner><ID>x</ID></Owner>")
    )
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>a+b</NextContinuationToken>"
    read = _parse_page(page(USUAL + other, more + "<CommonPrefixes><Prefix>d%2B/</Prefix></CommonPrefixes>"))
    assert [(listed.name, listed.etag, listed.size_bytes) for listed in read.objects] == [
        ("a b/+.png", "0f-2", 7),
        ("c/+.png", "0f-2", 7),
    ]
    assert (read.folders, read.next_token) == (["d+/"], "a+b")


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
def serve_names(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterable[str], str], list[str]]:
    """Serve the names of a bucket, two in each page. The requests for the folder ``failing``
    fail."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")

    def serve_names(names: Iterable[str], failing: str = "") -> list[str]:
        later = threading.Event()

        def answer(self: S3Connection, bucket: str, prefix: str, token: str = "", delimiter: str = "") -> bytes:
            if prefix > "5":
                later.set()
            elif prefix:
                assert later.wait(30), "a later folder answers first"
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

    return serve_names


NAMES = [f"{folder}/{number:02}.png" for folder in range(10) for number in range(11)]


def test_folders_listed_at_the_same_time_are_in_order(serve_names: Callable[..., list[str]]) -> None:
    names = serve_names(NAMES)
    assert [info.key for info in open_store("s3://names").list("")] == names


def test_error_in_a_folder_follows_the_names_before_it(serve_names: Callable[..., list[str]]) -> None:
    listed = list[str]()
    serve_names(NAMES, "4/")
    listing = open_store("s3://names").list("")
    with pytest.raises(TransientStoreError, match="no listing"):
        listed.extend(info.key for info in listing)
    assert listed == [name for name in NAMES if name < "4"]
