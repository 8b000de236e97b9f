"""Recognize the images in one part of the test split on a different machine. See
`evernear.evaluation.in_parts`."""

import tempfile
from pathlib import Path

from evernear.common.parts import Parts, Worker
from evernear.common.store.folder import fetch_folder
from evernear.data.shards import Dataset
from evernear.errors import IntegrityError
from evernear.evaluation.in_parts import Shared, candidate_folder, open_here
from evernear.evaluation.recognizer import Recognizer
from evernear.release.champion import open_released


def open_worker(parts: Parts) -> Worker:
    shared = Shared.model_validate(parts.plan.shared)
    dataset = Dataset.find(parts.store, shared.dataset, shared.digest)
    if dataset is None:
        raise IntegrityError(f"{parts.store.uri} no longer has the snapshot {shared.digest[:12]} of {shared.dataset}.")
    scratch = Path(tempfile.mkdtemp(prefix="evernear-systems-"))  # the process ends with the part
    network, index = scratch / "network", scratch / "index"
    fetch_folder(parts.store, candidate_folder(parts, "network"), network)
    fetch_folder(parts.store, candidate_folder(parts, "index"), index)
    systems = {"candidate": Recognizer.open(network, index, store=parts.store)}
    for name, version in shared.released.items():
        systems[name] = open_released(parts.store, version, scratch / name)
    return open_here(systems, dataset, parts)
