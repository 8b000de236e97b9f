"""Embeddings as text, in answers and in the query log: float16, little-endian, in base64."""

import base64

import numpy as np
from numpy.typing import NDArray

MAX_CHARACTERS = 2**16
"""A longer text is no embedding of a network of evernear."""
_TYPE = np.dtype("<f2")


def encode_embedding(embedding: NDArray[np.float32]) -> str:
    """The text of an embedding (D,)."""
    return base64.b64encode(embedding.astype(_TYPE).tobytes()).decode()


def decode_embedding(text: str) -> NDArray[np.float32] | None:
    """The embedding (D,) in an untrusted text; None if it is empty or damaged."""
    try:
        vector = np.frombuffer(base64.b64decode(text, validate=True), _TYPE).astype(np.float32)
    except ValueError:  # binascii.Error is one
        return None
    return vector if vector.any() and np.isfinite(vector).all() else None
