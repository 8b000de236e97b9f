"""What FastAPI and LitServe call: evernear's core, or the network and the search of tutorials."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tutorial import METADATA_FILE, Tutorial

from evernear.release.archive_reader import open_parts
from evernear.serving.core import Predictor
from evernear.serving.responses import Rejection

Answer = tuple[int, str]
"""Status and JSON."""


def open_recognizer(directory: Path) -> Callable[[Sequence[bytes]], list[Answer]]:
    """The core for the parts of a release, the tutorial's recognizer for the folder of the naive
    handler."""
    if not (directory / METADATA_FILE).exists():
        return _core(Predictor.open(open_parts(directory)))
    return _tutorial(Tutorial(directory), torch.jit.load(directory / "network.pt").eval())


def _core(predictor: Predictor) -> Callable[[Sequence[bytes]], list[Answer]]:
    def recognize(images: Sequence[bytes]) -> list[Answer]:
        answers = predictor.predict(images)
        return [(one.code if isinstance(one, Rejection) else 200, one.model_dump_json()) for one in answers]

    return recognize


def _tutorial(tutorial: Tutorial, network: torch.jit.ScriptModule) -> Callable[[Sequence[bytes]], list[Answer]]:
    def recognize(images: Sequence[bytes]) -> list[Answer]:
        with torch.inference_mode():
            embeddings = network(torch.stack([tutorial.decode(image) for image in images]))
        return [(200, json.dumps(answer)) for answer in tutorial.search(embeddings)]

    return recognize
