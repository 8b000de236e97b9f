"""Tests of an index, which run with both backends if Milvus's client is installed."""

from typing import Protocol

import pytest

from evernear.settings import IndexSettings
from tests.gallery_vectors import make_embeddings

__all__ = ["make_embeddings"]


class MakeSettings(Protocol):
    def __call__(self, **changes: object) -> IndexSettings: ...


@pytest.fixture(scope="module")
def index_settings(request: pytest.FixtureRequest) -> MakeSettings:
    """Settings of FAISS, or of Milvus in test files with ``BACKEND = "milvus"``."""
    backend = getattr(request.module, "BACKEND", "faiss")
    uri = request.getfixturevalue("milvus_uri") if backend == "milvus" else ""
    return lambda **changes: IndexSettings.model_validate({"backend": backend, "uri": uri, **changes})
