from datetime import UTC, datetime, timedelta, timezone
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evernear.errors import IntegrityError
from evernear.release.manifest import ReleaseManifest, is_version, new_version

MOMENTS = st.datetimes(datetime(2020, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)


@given(MOMENTS, MOMENTS, DIGESTS, DIGESTS)
def test_versions_sort_by_time(a: datetime, b: datetime, first: str, second: str) -> None:
    if a.replace(microsecond=0) < b.replace(microsecond=0):
        assert new_version(a, first) < new_version(b, second)


@given(MOMENTS, DIGESTS)
def test_version_needs_no_escaping_in_urls_and_file_names(moment: datetime, digest: str) -> None:
    version = new_version(moment, digest)
    assert quote(version, safe="") == version
    assert is_version(version)


def test_version_is_in_utc() -> None:
    tokyo = datetime(2026, 11, 20, 23, 5, 1, tzinfo=timezone(timedelta(hours=9)))
    assert new_version(tokyo, "1a2b3c4d" + "0" * 56) == "20261120.140501.1a2b3c4d"


@pytest.mark.parametrize("text", ["", "1.0", "../20261120.140501.1a2b3c4d", "20261120.140501.1a2b3c4d\n", "latest"])
def test_invalid_versions_are_rejected(text: str) -> None:
    assert not is_version(text)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff"])
def test_invalid_manifest_is_rejected_with_its_path(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="somewhere is not a valid release manifest"):
        ReleaseManifest.from_json(data, "somewhere")
