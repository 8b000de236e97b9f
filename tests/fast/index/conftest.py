"""Tests of an index, which run with both backends if Milvus's client is installed."""

from typing import Protocol

import pytest

from evernear.settings import IndexSettings
from tests.gallery_vectors import make_embeddings

__all__ = ["make_embeddings"]


class MakeSettings(Protocol):
    def __call__(self, **changes: object) -> IndexSettings: ...


@pytest.fixture(scope="module")
def index_settings() -> MakeSettings:
    """Settings of FAISS; `tests/integrations/milvus` runs the tests that use them with Milvus."""
    return lambda **changes: IndexSettings.model_validate({"backend": "faiss", **changes})
