"""The promotion policy: whether a release may become the champion. It is checked right before each
deployment, and rejects in case of doubt."""

from pathlib import Path

from evernear.common.disk import sha256_bytes
from evernear.errors import ConflictError, IntegrityError
from evernear.evaluation.verdict import Verdict
from evernear.index.description import describe_index
from evernear.release.archive_reader import ReleaseParts, open_release
from evernear.release.manifest import VERDICT_FILE
from evernear.release.promotions import Champion


def check_candidate(
    archive: Path, verdict_file: Path, champion: Champion | None, out_dir: Path
) -> tuple[ReleaseParts, str | None]:
    """Unpack ``archive`` into ``out_dir``, and check that the release may replace ``champion``.

    Return the release's parts and the verdict's anchor. This is None if the verdict has none, if no
    champion exists, or if the release is already the champion.

    Raises:
        IntegrityError: the archive is damaged, or its verdict is missing, says hold, or was issued
            for a different network, index or champion.
        ConflictError: the release was measured against a different champion or anchor.
    """
    parts = open_release(archive, out_dir)
    manifest = parts.manifest
    verdict = _read_verdict(verdict_file, parts)
    if not verdict.promote:
        raise _hold_error(parts, verdict)
    current = champion.version if champion else None
    if current not in (manifest.parent, manifest.version):
        raise ConflictError(
            f"Release {manifest.version} was measured against {manifest.parent or 'no champion'}, "
            f"but {current or 'none'} is the champion now; run again."
        )
    measured = verdict.anchor
    if measured is None or champion is None or current == manifest.version:
        return parts, None
    if champion.anchor not in (measured.version, measured.former):
        raise ConflictError(
            f"Release {manifest.version} was measured against the anchor {measured.former or measured.version}, but "
            f"{champion.anchor} is the anchor now; run again."
        )
    return parts, measured.version


def check_promotable(parts: ReleaseParts, *, force: bool) -> None:
    """Check that a release may be promoted manually, regardless of the champion that it was
    compared with. ``force`` overrules a hold verdict."""
    verdict = Verdict.from_json(parts.read(VERDICT_FILE), f"{VERDICT_FILE} of release {parts.manifest.version}")
    if not verdict.promote and not force:
        raise IntegrityError(f"{_hold_error(parts, verdict)} To promote it anyway, add --force and --why.")


def _read_verdict(path: Path, parts: ReleaseParts) -> Verdict:
    """Check that the verdict is the archived one and applies to the archive's parts."""
    manifest = parts.manifest
    try:
        data = path.read_bytes()
    except OSError:
        raise IntegrityError(f"{path} cannot be read, so the release has no verdict and is not deployed.") from None
    if sha256_bytes(data) != manifest.verdict_sha256:
        raise IntegrityError(f"{path} is not the verdict that the release was archived with.")
    verdict = Verdict.from_json(data, path)
    measured = (verdict.candidate.network_sha256, verdict.candidate.index_digest)
    if measured != (manifest.network_sha256, describe_index(parts.directory).digest):
        raise IntegrityError(
            f"The verdict {path} is about another network or index than release {manifest.version}'s. Run again."
        )
    if (verdict.champion.name if verdict.champion else None) != manifest.parent:
        raise IntegrityError(
            f"The verdict {path} is against another champion than {manifest.parent or 'none'}, which release "
            f"{manifest.version} names; run again."
        )
    return verdict


def _hold_error(parts: ReleaseParts, verdict: Verdict) -> IntegrityError:
    reasons = " ".join(verdict.reasons)
    return IntegrityError(f"The verdict on release {parts.manifest.version} is hold: {reasons}")
