from pathlib import Path

import pytest

from evernear.release.archive_reader import ReleaseParts
from tests.prep_server import ReleaseStore


@pytest.fixture
def stored_releases(parts: ReleaseParts, tmp_path: Path) -> ReleaseStore:
    return ReleaseStore(tmp_path / "store", parts.manifest)
