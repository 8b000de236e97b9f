"""Ingests with small shards and parts, so that a few images fill several of them."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from evernear.common.store import Store, open_store
from evernear.data import ingest
from evernear.data.manifest import Manifest
from evernear.data.shards import Dataset
from evernear.data.validate import Finding, validate_dataset
from evernear.settings import DataSettings, ValidationSettings

LIMITS = {
    "shard_size_bytes": "evernear.data.ingest.SHARD_SIZE_BYTES",
    "part_names": "evernear.data.parts.PART_NAMES",
    "requests_in_flight": "evernear.data.parts.REQUESTS_IN_FLIGHT",
    "decode_threads": "evernear.data.parts.available_cpus",
}
OPTIONS = ("max_size_px", "photo_size_px", "warn", "run", "reread", "moved_from", "left_out")
"""Arguments of `ingest_source`."""
SMALL = 2**16


@contextmanager
def limits(**numbers: int) -> Generator[None]:
    """Ingest, embed or evaluate within the limits ``numbers``, which have the names of `LIMITS`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, number in numbers.items():
            patch.setattr(LIMITS[name], (lambda count=number: count) if name == "decode_threads" else number)
        yield


def ingest_small(settings: DataSettings, store_uri: str, *args: Any, **options: Any) -> Manifest:
    """`ingest_source` with shards of at most 64 KiB, unless ``options`` has other `LIMITS`."""
    numbers = {"shard_size_bytes": SMALL} | {name: options.pop(name) for name in LIMITS if name in options}
    with limits(**numbers):
        return ingest.ingest_source(settings, store_uri, *args, **options)


def ingest_with(source: str, store_uri: str, **settings: Any) -> Manifest:
    """`ingest_small` with ``settings``, which may contain `LIMITS` and `OPTIONS`."""
    options = {name: settings.pop(name) for name in (*LIMITS, *OPTIONS) if name in settings}
    return ingest_small(DataSettings.model_validate({"source": source, **settings}), store_uri, **options)


def opened(manifest: Manifest) -> Dataset:
    return Dataset(manifest, open_store(manifest.store_uri))


def dataset_of(source: Path | str, store: Path | Store, **settings: Any) -> Dataset:
    """Ingest a folder or another source with shards of the usual size."""
    values = {"source": f"folder:{source}" if isinstance(source, Path) else source, **settings}
    store = open_store(store.as_uri()) if isinstance(store, Path) else store
    return Dataset(ingest.ingest_source(DataSettings.model_validate(values), store.uri), store)


def findings(manifest: Manifest, **settings: Any) -> tuple[Finding, ...]:
    return validate_dataset(opened(manifest), ValidationSettings.model_validate(settings)).findings


def noted(manifest: Manifest, rule: str) -> list[str]:
    """The files that an ingest noted for a rule."""
    return [name for problem in manifest.problems if problem.kind == rule for name in problem.names]
