"""A map of embeddings in two dimensions, for the run page."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from evernear.common.step_results import Computed, compute_once, result_key
from evernear.common.store import Store

LIBRARIES = ("numpy", "scikit-learn")
"""Libraries whose versions affect the positions."""


def map_positions(embeddings: NDArray[np.float32], store: Store) -> NDArray[np.float32]:
    """Like `project`, and stored for later runs on the same images with the same network."""

    def compute() -> Computed:
        return Computed("map of embeddings", {"positions": project(embeddings).tolist()})

    sha256 = hashlib.sha256(embeddings.tobytes()).hexdigest()
    key = result_key(__name__, LIBRARIES, embeddings=sha256, shape=[*embeddings.shape])
    computed = compute_once(store, key, None, compute)
    return np.array(computed.output["positions"], np.float32)


def project(embeddings: NDArray[np.float32]) -> NDArray[np.float32]:
    """Positions (N, 2) in the unit square, from t-SNE of ``embeddings`` (N, D).

    Principal components as the starting positions halve the number of iterations (Kobak and Berens
    2019, https://doi.org/10.1038/s41467-019-13056-x). If there are fewer than four embeddings, or
    if all are equal, all positions are in the middle.
    """
    from sklearn.manifold import TSNE

    count = len(embeddings)
    if count < 4 or np.ptp(embeddings, axis=0).max() < 1e-6:
        return np.full((count, 2), 0.5, np.float32)
    init = "pca" if embeddings.shape[1] > 1 else "random"
    model = TSNE(perplexity=min(30.0, (count - 1) / 3), init=init, random_state=0, max_iter=500)
    positions = model.fit_transform(embeddings)
    low, high = positions.min(axis=0), positions.max(axis=0)
    return (positions - low) / np.maximum(high - low, 1e-9)
