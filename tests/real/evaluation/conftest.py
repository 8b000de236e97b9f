import pytest

from evernear.evaluation.recognizer import Recognizer
from tests.gallery_vectors import make_embeddings
from tests.releases import System

__all__ = ["make_embeddings"]


@pytest.fixture(scope="session")
def recognizer(system: System) -> Recognizer:
    return Recognizer.open(system.network_dir, system.index_dir, "v1")
