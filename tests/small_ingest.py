"""Ingests with small shards and parts, so that a few images fill several of them."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from evernear.data import ingest
from evernear.data.manifest import Manifest
from evernear.settings import DataSettings

LIMITS = {
    "shard_size_bytes": "evernear.data.ingest.SHARD_SIZE_BYTES",
    "part_names": "evernear.data.decode_part.PART_NAMES",
    "requests_in_flight": "evernear.data.decode_part.REQUESTS_IN_FLIGHT",
    "decode_threads": "evernear.data.decode_part.available_cpus",
}
OPTIONS = ("max_size_px", "run", "reread", "moved_from")
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
