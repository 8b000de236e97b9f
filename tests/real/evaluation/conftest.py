from tests.gallery_vectors import make_embeddings

__all__ = ["make_embeddings"]
