"""Checkpoints of a training, so that a killed one goes on where it was.

A checkpoint lives in the store under ``checkpoints/<key>/``, where the key is a hash of all that decides the
result: the data, the settings, the labels left out, and the versions of evernear and torch. A training of the
same key therefore may take it up, and one with anything changed starts anew. When a training has ended its
checkpoint shrinks to the weights and the history and stays, so that a pipeline which failed in a later step
does not train again; whoever needs the space may delete ``checkpoints/`` at any time.
"""

import hashlib
import io
import json
from collections.abc import Mapping
from typing import Any

import torch

import evernear
from evernear.errors import TrainingError
from evernear.settings import TrainSettings
from evernear.store import Store

WITHOUT_EFFECT = {"parity_tolerance", "checkpoint_every_epochs"}
"""Settings that do not change the weights."""

State = dict[str, Any]


def checkpoint_key(dataset_digest: str, settings: TrainSettings, exclude_labels: frozenset[str]) -> str:
    """The hash under which a training finds its own checkpoint again."""
    decisive = {
        "dataset": dataset_digest,
        "settings": settings.model_dump(mode="json", exclude=WITHOUT_EFFECT),
        "exclude_labels": sorted(exclude_labels),
        "evernear": evernear.__version__,
        "torch": str(torch.__version__),
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


class Checkpoints:
    """The checkpoints of one training; with no store they are neither kept nor found."""

    def __init__(self, store: Store | None, key: str) -> None:
        self._store = store
        self._object = f"checkpoints/{key}/state.pt"

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint, in one atomic put."""
        if self._store is None:
            return
        self._store.put(self._object, to_bytes(state))

    def load(self) -> State | None:
        """The last checkpoint, its tensors on the CPU, or None.

        Raises:
            TrainingError: the object is there but is no checkpoint.
        """
        found = self._store.find(self._object) if self._store else None
        if found is None or self._store is None:
            return None
        try:
            return from_bytes(found[0])
        except Exception as error:  # torch.load raises many kinds: RuntimeError, UnpicklingError, EOFError ...
            place = f"{self._store.uri}/{self._object}"
            raise TrainingError(f"The checkpoint {place} cannot be read; delete it and run again.") from error


def to_bytes(state: Mapping[str, Any]) -> bytes:
    """``state``, of tensors and plain values, in torch's file format."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> State:
    """What `to_bytes` wrote; only tensors and plain values are read, never pickled code."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
