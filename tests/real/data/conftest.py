"""Small trees of real image files, and readers for ingested snapshots."""

from tests.fast.data.conftest import contents, digest_of, make_image, run_ingest, tree

__all__ = ["contents", "digest_of", "make_image", "run_ingest", "tree"]
