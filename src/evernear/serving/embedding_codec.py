"""Embeddings as text, in answers and in the query log: float16, little-endian,
in base64.
"""

import base64

import numpy as np
from numpy.typing import NDArray

MAX_CHARACTERS = 2**16
"""Maximum length of the text. The embeddings of evernear's networks are shorter."""
_TYPE = np.dtype("<f2")


def encode_embedding(embedding: NDArray[np.float32]) -> str:
    """Encode an embedding (D,) as text."""
    return base64.b64encode(embedding.astype(_TYPE).tobytes()).decode()


def decode_embedding(text: str) -> NDArray[np.float32] | None:
    """Decode an embedding (D,) from untrusted text.
    Returns None if the text is empty or damaged.
    """
    try:
        vector = np.frombuffer(base64.b64decode(text, validate=True), _TYPE).astype(np.float32)
    except ValueError:  # includes binascii.Error
        return None
    return vector if vector.any() and np.isfinite(vector).all() else None
