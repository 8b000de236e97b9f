"""Whether a release may serve at all; asked again right before it does, and answered no when in doubt."""

import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict, StrictBool, ValidationError

from evernear.errors import Conflict, IntegrityError
from evernear.release.parts import ReleaseParts, open_release
from evernear.release.registry import Champion, Registry
from evernear.store import Store, sha256_bytes


class Deployment(BaseModel):
    """A release that became the champion; ``url`` takes images, where a server was brought up for it."""

    model_config = ConfigDict(frozen=True)

    version: str
    previous: str | None
    url: str | None = None
    smoke_queries: int = 0


class _Verdict(BaseModel):
    """As much of a verdict as decides."""

    promote: StrictBool
    reasons: tuple[str, ...] = ()


def admit(archive: Path, verdict_file: Path, champion: Champion | None, out_dir: Path) -> ReleaseParts:
    """Unpack ``archive`` into ``out_dir`` and check that it may replace ``champion``.

    Raises:
        IntegrityError: the archive is damaged; its verdict is missing, another one, or does not promote it.
        Conflict: the release was measured against another champion.
    """
    parts = open_release(archive, out_dir)
    manifest = parts.manifest
    verdict = _read_verdict(verdict_file, manifest.verdict_sha256)
    if not verdict.promote:
        reasons = "; ".join(verdict.reasons) or "it gives no reason"
        raise IntegrityError(f"The verdict holds release {manifest.version}: {reasons}.")
    now = champion.version if champion else None
    if now not in (manifest.parent, manifest.version):
        raise Conflict(
            f"Release {manifest.version} was measured against {manifest.parent or 'no champion'}, "
            f"but {now or 'none'} is the champion now; run again."
        )
    return parts


def publish(archive: Path, verdict_file: Path, store: Store) -> Deployment:
    """Admit a release, keep it in the registry and make it the champion, without a server to prove it on.

    For a cluster, whose servers take the champion from the registry. Raises as `admit`, and `StoreError`.
    """
    registry = Registry(store)
    champion = registry.champion()
    with tempfile.TemporaryDirectory() as temporary:
        manifest = admit(archive, verdict_file, champion, Path(temporary) / "release").manifest
    registry.publish(archive, manifest)
    if champion is None or champion.version != manifest.version:
        champion = registry.set_champion(manifest.version, champion)
    return Deployment(version=champion.version, previous=champion.previous)


def _read_verdict(path: Path, sha256: str) -> _Verdict:
    try:
        data = path.read_bytes()
        if sha256_bytes(data) != sha256:
            raise IntegrityError(f"{path} is not the verdict that the release was archived with.")
        return _Verdict.model_validate_json(data)
    except (OSError, ValidationError):
        raise IntegrityError(f"{path} holds no verdict, so nothing is deployed.") from None
