"""Whether a release may serve at all; asked again right before it does, and answered no when in doubt."""

import tempfile
from pathlib import Path

from evernear.disk import sha256_bytes
from evernear.errors import ConflictError, IntegrityError, TransientStoreError
from evernear.evaluation.verdict import Verdict
from evernear.frozen import Frozen
from evernear.index.description import describe_index
from evernear.release.archive_reader import VERDICT_FILE, ReleaseParts, open_release
from evernear.release.registry import Cause, Champion, Registry
from evernear.store import Store


class Deployment(Frozen):
    """A release that became the champion; ``url`` takes images, where a server was brought up for it.

    ``champion_fault`` tells why the release it replaced could not be brought up beside it, if it could not.
    """

    version: str
    previous: str | None
    url: str | None = None
    smoke_queries: int = 0
    champion_fault: str | None = None


def admit(archive: Path, verdict_file: Path, champion: Champion | None, out_dir: Path) -> ReleaseParts:
    """Unpack ``archive`` into ``out_dir`` and check that it may replace ``champion``.

    Raises:
        IntegrityError: the archive is damaged; its verdict is missing, is that of another network or index,
            or does not promote it.
        ConflictError: the release was measured against another champion.
    """
    parts = open_release(archive, out_dir)
    manifest = parts.manifest
    verdict = _read_verdict(verdict_file, parts)
    if not verdict.promote:
        raise _held(parts, verdict)
    now = champion.version if champion else None
    if now not in (manifest.parent, manifest.version):
        raise ConflictError(
            f"Release {manifest.version} was measured against {manifest.parent or 'no champion'}, "
            f"but {now or 'none'} is the champion now; run again."
        )
    return parts


def readmit(parts: ReleaseParts, force: bool) -> None:
    """Check that a release of the registry may be promoted by a person, whatever champion it was measured against.

    ``force`` overrules a verdict that holds.

    Raises:
        IntegrityError: its verdict holds it, or is none.
    """
    verdict = Verdict.from_json(parts.read(VERDICT_FILE), f"{VERDICT_FILE} of release {parts.manifest.version}")
    if not verdict.promote and not force:
        raise IntegrityError(f"{_held(parts, verdict)} To promote it anyway, add --force and --why.")


def publish(archive: Path, verdict_file: Path, store: Store, cause: Cause | None = None) -> Deployment:
    """Admit a release, keep it in the registry and make it the champion, without a server to prove it on.

    For a cluster, whose servers take the champion from the registry. Raises as `admit`, and `StoreError`.
    """
    registry = Registry(store)
    champion = registry.champion()
    with tempfile.TemporaryDirectory() as temporary:
        manifest = admit(archive, verdict_file, champion, Path(temporary) / "release").manifest
    registry.publish(archive)
    if champion is None or champion.version != manifest.version:
        champion = registry.set_champion(manifest.version, champion, cause=cause)
    return Deployment(version=champion.version, previous=champion.previous)


def unrecorded(version: str, error: TransientStoreError) -> TransientStoreError:
    """The error of a release that was proved and stays in place though the store did not take it as the champion.

    Taking it back would replace what answers by what may not even start: its archive comes from the same store. And
    the pointer may have moved.
    """
    return TransientStoreError(
        f"Release {version} answered its stored queries and stays in place, but it may not be recorded as the champion:"
        f" {error} When the store can be reached, `evernear registry champion` shows what is recorded; if that is not "
        f"{version}, run `evernear registry promote {version}` or this step again."
    )


def _read_verdict(path: Path, parts: ReleaseParts) -> Verdict:
    """The verdict in ``path``, which has to be the one of the archive, on the very parts of the archive."""
    manifest = parts.manifest
    try:
        data = path.read_bytes()
    except OSError:
        raise IntegrityError(f"{path} holds no verdict, so nothing is deployed.") from None
    if sha256_bytes(data) != manifest.verdict_sha256:
        raise IntegrityError(f"{path} is not the verdict that the release was archived with.")
    verdict = Verdict.from_json(data, path)
    measured = (verdict.candidate.network_sha256, verdict.candidate.index_digest)
    if measured != (manifest.network_sha256, describe_index(parts.directory).digest):
        raise IntegrityError(
            f"The verdict {path} is on another network or index than those of release {manifest.version}; run again."
        )
    if (verdict.champion.name if verdict.champion else None) != manifest.parent:
        raise IntegrityError(
            f"The verdict {path} was reached against another champion than {manifest.parent or 'none'}, which "
            f"release {manifest.version} names; run again."
        )
    return verdict


def _held(parts: ReleaseParts, verdict: Verdict) -> IntegrityError:
    reasons = " ".join(verdict.reasons)
    return IntegrityError(f"The verdict holds release {parts.manifest.version}: {reasons}")
