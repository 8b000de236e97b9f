"""What a release says of itself to those who ask a server."""

from evernear.release.manifest import ReleaseManifest
from evernear.serving.messages import Metadata


def metadata_of(manifest: ReleaseManifest, model: str) -> Metadata:
    """The public part of a release's manifest; ``model`` is the name that it is served under."""
    return Metadata(
        model=model,
        version=manifest.version,
        created=manifest.created,
        height_px=manifest.preprocessing.height_px,
        width_px=manifest.preprocessing.width_px,
        channels=manifest.preprocessing.channels,
        max_pixels=manifest.max_pixels,
        labels=manifest.labels,
        embedding_dim=manifest.embedding_dim,
        threshold=manifest.threshold,
        metrics=manifest.metrics,
    )
