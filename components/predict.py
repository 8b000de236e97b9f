"""The images of a source and a release -> predictions as Parquet files."""

from components import component


@component
def predict(run: str, store: str, images: str, out: str, release: str, nodes: int):
    """Recognize all images of a source with a release, without a server."""
    from evernear import steps

    steps.predict(run, store, images, out, release, nodes)
