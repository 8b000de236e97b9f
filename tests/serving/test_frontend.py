"""Our part of TorchServe's frontend is what its source says."""

import zipfile

from evernear.serving.frontend.build import HASH_FILE, source_sha256
from evernear.serving.java import FRONTEND_ARCHIVE


def test_the_archive_was_made_of_the_source_beside_it() -> None:
    with zipfile.ZipFile(FRONTEND_ARCHIVE) as archive:
        assert archive.read(HASH_FILE).decode() == source_sha256(), "run `python -m evernear.serving.frontend.build`"
