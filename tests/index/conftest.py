"""Tests of an index, which run with both backends if Milvus's client is installed."""

from importlib.util import find_spec
from typing import Protocol

import pytest

from evernear.settings import IndexSettings
from tests.gallery_vectors import make_embeddings

__all__ = ["make_embeddings"]
MILVUS = pytest.param("milvus", marks=pytest.mark.skipif(find_spec("pymilvus") is None, reason="needs pymilvus"))


class MakeSettings(Protocol):
    def __call__(self, **changes: object) -> IndexSettings: ...


@pytest.fixture(scope="module", params=["faiss", MILVUS])
def index_settings(request: pytest.FixtureRequest) -> MakeSettings:
    """Settings of either backend; a test that uses them runs with both."""
    backend = {"backend": request.param}
    if request.param == "milvus":
        backend["uri"] = request.getfixturevalue("milvus_uri")
    return lambda **changes: IndexSettings.model_validate(backend | changes)
