"""The committed jar of TorchServe's frontend matches its sources."""

import runpy
import zipfile

from evernear.serving.configuration import FRONTEND_ARCHIVE
from tests import ROOT


def test_jar_was_built_from_the_committed_sources() -> None:
    build = runpy.run_path(str(ROOT / ".ci" / "build_frontend.py"))
    with zipfile.ZipFile(FRONTEND_ARCHIVE) as archive:
        assert archive.read(build["HASH_FILE"]).decode() == build["source_sha256"](), "run `make frontend`"
