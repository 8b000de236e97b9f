"""``python -m evernear.serving.frontend.build``: compile the frontend; needs a JDK (``javac``), which no user does.

The archive lies in the tree, as those who serve have a Java that runs but none that compiles. It carries the hash of
the source it was made of, and a test compares the two.
"""

import hashlib
import subprocess
import tempfile
import zipfile
from pathlib import Path

from evernear.serving.java import FRONTEND_ARCHIVE, JAVA_MAJOR_VERSION, torchserve_packages

HERE = Path(__file__).parent
SOURCES = sorted(HERE.rglob("*.java"))
HASH_FILE = "META-INF/sources.sha256"
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same source and compiler give the same archive


def source_sha256() -> str:
    """The hash of all sources."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()


def build() -> None:
    """Compile the sources against the installed TorchServe, and write the archive."""
    with tempfile.TemporaryDirectory() as temporary:
        classpath = torchserve_packages() / "ts" / "frontend" / "*"
        options = ["--release", str(JAVA_MAJOR_VERSION), "-proc:none", "-cp", str(classpath), "-d", temporary]
        subprocess.run(["javac", *options, *map(str, SOURCES)], check=True)
        with zipfile.ZipFile(FRONTEND_ARCHIVE, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(zipfile.ZipInfo(HASH_FILE, EPOCH), source_sha256())
            for path in sorted(Path(temporary).rglob("*.class")):
                name = path.relative_to(temporary).as_posix()
                archive.writestr(zipfile.ZipInfo(name, EPOCH), path.read_bytes())


if __name__ == "__main__":
    build()
