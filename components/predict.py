"""The images of a source and a release -> predictions as Parquet files."""

from typing import Any

from components import component


@component
def predict(run: str, store: str, settings: dict[str, Any], images: str, out: str, release: str, nodes: str):
    """Recognize all images of a source with a release, without a server."""
    from evernear import steps

    steps.predict(run, store, settings, images, out, release, nodes)
