"""Bring a release up, prove that it answers, or leave the old one in place."""

from pathlib import Path

from evernear.deployment.admission import Deployment, publish
from evernear.deployment.local import deploy as deploy_locally
from evernear.release.parts import ARCHIVE_FILE
from evernear.settings import Settings
from evernear.store import open_store


def deploy(release_dir: Path, verdict_file: Path, settings: Settings) -> Deployment:
    """Let what the archive step left in ``release_dir`` serve at ``settings.target``.

    Raises:
        IntegrityError, Conflict: it may not serve, see `evernear.deployment.admission.admit`.
        ServingError: the server or the release does not come up; what served before still does.
        StoreError: the registry cannot be reached.
    """
    archive = release_dir / ARCHIVE_FILE
    if settings.target == "local":
        return deploy_locally(archive, verdict_file, settings)
    return publish(archive, verdict_file, open_store(settings.store_uri))
