"""Compile the frontend with ``python .ci/build_frontend.py``. This needs ``javac``.

The jar is committed, because users may have a Java runtime but no compiler. It contains a hash of
its sources, which a test compares with the files.
"""

import hashlib
import subprocess
import tempfile
import zipfile
from pathlib import Path

from evernear.serving.configuration import FRONTEND_ARCHIVE, torchserve_packages

HERE = FRONTEND_ARCHIVE.parent
SOURCES = sorted(HERE.rglob("*.java"))
HASH_FILE = "META-INF/sources.sha256"
EPOCH = (1980, 1, 1, 0, 0, 0)  # a fixed time makes the archive reproducible


def source_sha256() -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()


def build_frontend() -> None:
    """Compile the sources against the installed TorchServe, and write the jar."""
    with tempfile.TemporaryDirectory() as temporary:
        classpath = torchserve_packages() / "ts" / "frontend" / "*"
        options = ["--release", "17", "-proc:none", "-cp", str(classpath), "-d", temporary]
        subprocess.run(["javac", *options, *map(str, SOURCES)], check=True)
        with zipfile.ZipFile(FRONTEND_ARCHIVE, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(zipfile.ZipInfo(HASH_FILE, EPOCH), source_sha256())
            archive.writestr(zipfile.ZipInfo("evernear/", EPOCH), "")  # log4j searches this package for plugins
            for path in sorted(Path(temporary).rglob("*.class")):
                name = path.relative_to(temporary).as_posix()
                archive.writestr(zipfile.ZipInfo(name, EPOCH), path.read_bytes())


if __name__ == "__main__":
    build_frontend()
