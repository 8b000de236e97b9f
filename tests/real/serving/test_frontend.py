"""The committed jar of TorchServe's frontend matches its sources."""

import zipfile

from evernear.serving.build_frontend import HASH_FILE, source_sha256
from evernear.serving.configuration import FRONTEND_ARCHIVE


def test_jar_was_built_from_the_committed_sources() -> None:
    with zipfile.ZipFile(FRONTEND_ARCHIVE) as archive:
        assert archive.read(HASH_FILE).decode() == source_sha256(), "run `python -m evernear.serving.build_frontend`"
