"""The published record of a release, and the store keys for records and archives."""

import gzip
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Self

from evernear.common.disk import sha256_file
from evernear.common.frozen import Frozen
from evernear.evaluation.verdict import Verdict
from evernear.release.archive_reader import read_release
from evernear.release.manifest import VERDICT_FILE, ReleaseManifest, Sha256

RELEASES = "releases/"
MANIFESTS = f"{RELEASES}manifests/"
ARCHIVES = f"{RELEASES}archives/"
PRUNED = f"{RELEASES}pruned/"
_GZIP = b"\x1f\x8b"


class Decision(Frozen):
    promote: bool
    reasons: tuple[str, ...]


class Record(Frozen):
    remedy = "run `evernear store check --repair`"

    manifest: ReleaseManifest
    archive_sha256: Sha256
    archive_size_bytes: int
    verdict: Decision

    @property
    def archive_key(self) -> str:
        return f"{ARCHIVES}{self.archive_sha256}.mar"

    @classmethod
    def from_json(cls, data: bytes | str, source: Path | str, remedy: str | None = None) -> Self:
        """Like `Frozen.from_json`. Records of pruned releases are compressed."""
        if isinstance(data, bytes) and data.startswith(_GZIP):
            with suppress(OSError, EOFError, zlib.error):  # a damaged record is no JSON either
                data = gzip.decompress(data)
        return super().from_json(data, source, remedy)


def record_key(folder: str, version: str) -> str:
    return f"{folder}{version}.json"


def describe_archive(archive: Path) -> Record:
    """Create the record for an archive.

    Raises:
        IntegrityError: the archive is not a valid release.
    """
    manifest, texts = read_release(archive)
    verdict = Verdict.from_json(texts[VERDICT_FILE], f"{VERDICT_FILE} in {archive}")
    return Record(
        manifest=manifest,
        archive_sha256=sha256_file(archive),
        archive_size_bytes=archive.stat().st_size,
        verdict=Decision(promote=verdict.promote, reasons=tuple(verdict.reasons)),
    )
