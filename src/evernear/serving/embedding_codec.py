"""Embeddings as text, for responses and the query log: base64 of little-endian float16 values."""

import base64

import numpy as np
from numpy.typing import NDArray

MAX_CHARACTERS = 2**16
"""Maximum length of the text. The embeddings from evernear's networks need less."""
_TYPE = np.dtype("<f2")


def encode_embedding(embedding: NDArray[np.float32]) -> str:
    return base64.b64encode(embedding.astype(_TYPE).tobytes()).decode()


def decode_embedding(text: str) -> NDArray[np.float32] | None:
    """Decode an embedding of shape (D,) from untrusted text. None if it is empty or damaged."""
    try:
        vector = np.frombuffer(base64.b64decode(text, validate=True), _TYPE).astype(np.float32)
    except ValueError:  # includes binascii.Error
        return None
    return vector if vector.any() and np.isfinite(vector).all() else None
