"""Plan the parts of an ingest, and run them. Each part is a range of the files in
decoding order.

The decoding order depends only on the listing, and so do the parts. If an ingest is
killed and run again, the new run first finishes the planned parts. After that, the new
run plans the files that were added since. Plans are numbered::

    datasets/<name>/parts/<parent snapshot>/<settings>/<number>/...   see `evernear.data.decode_part`
"""  # noqa: W505

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from heapq import merge
from itertools import groupby
from uuid import uuid4

from evernear.common.disk import sha256_bytes
from evernear.common.parts import OpenWorker, Parts
from evernear.common.store import Store
from evernear.data.decode_part import (
    KIND,
    DecodedFiles,
    IngestPart,
    MissingObjectError,
    Shared,
    decoded_names,
    open_here,
)
from evernear.data.decoding import ImageForm
from evernear.data.ledger import Ledger, decode_order
from evernear.data.manifest import Manifest
from evernear.data.snapshots import Snapshots
from evernear.data.sources import FileEntry, FileSource
from evernear.data.sources.packed import PackedFiles
from evernear.data.sqlite import batched
from evernear.errors import EvernearError
from evernear.settings import DataSettings

RunParts = Callable[[Parts, OpenWorker], object]
"""Runs all parts that do not have a result yet. The `OpenWorker` opens a worker in this process."""
PART_SIZE_BYTES = 2**30
"""Most bytes of files in a part, and of their pixels in the form of the dataset."""
_MERGED_FILES = 256
PART_NAMES = 20_000
"""Maximum number of files in a part, which limits the work that a killed ingest loses."""
_OF_SPEED = {"nodes"}
"""Settings that do not change the outcome of decoding a file."""


def parts_folder(
    snapshots: Snapshots, settings: DataSettings, parent: Manifest | None, decoder: str, max_size_px: int, adopt: bool
) -> str:
    """Where plans are stored. With ``adopt``, plans of an equal earlier ingest are reused."""
    ledger = (parent.ledger_sha256, *parent.ledger_changes) if parent else ()
    # The key includes the names of all settings, because a version with different settings could
    # not read the plans.
    chosen = f"{[*DataSettings.model_fields]} {settings.model_dump_json(exclude=_OF_SPEED)} {max_size_px}"
    begun = f"{chosen} {ledger} {decoder}"
    key = sha256_bytes(begun.encode()) if adopt else uuid4().hex
    return f"{snapshots.parts_folder(parent)}{key[:16]}"


def planned_form(store: Store, folder: str) -> ImageForm | None:
    """The form of a killed ingest. Another sample of the files might lead to another form."""
    parts = Parts.find(store, f"{folder}/0")
    return Shared.model_validate(parts.plan.shared).form if parts else None


def decode_in_parts(
    source: FileSource,
    settings: DataSettings,
    form: ImageForm,
    ledger: Ledger,
    store: Store,
    folder: str,
    run: RunParts,
    on_files: Callable[[int], None],
) -> list[Parts]:
    """Decode the pending files, and return the plans with the results, newest first."""
    plans: list[Parts] = []

    def run_plan(parts: Parts) -> None:
        try:
            run(parts, partial(open_here, source, settings, form, on_files))
        except EvernearError as error:
            if Parts.find(store, parts.folder) is None:
                raise MissingObjectError("Another ingest of the same files finished in the meantime.") from error
            raise

    while (earlier := Parts.find(store, f"{folder}/{len(plans)}")) is not None:
        with suppress(EvernearError):  # files may have been deleted since, and the next plan has the remaining files
            run_plan(earlier)
        ledger.note_decoded(decoded_names(earlier))
        plans.insert(0, earlier)
    if ledger.count_to_decode():
        parts = cut(ledger.to_decode(), source, PART_NAMES, math.prod(form.shape))
        shared = Shared(settings=settings, form=form).model_dump(mode="json")
        plans.insert(0, Parts.make(store, f"{folder}/{len(plans)}", KIND, shared, parts))
        run_plan(plans[0])
    return plans


def cut(entries: Iterable[FileEntry], source: FileSource, names: int, image_bytes: int) -> Iterator[IngestPart]:
    """Yield parts with at most ``names`` files and `PART_SIZE_BYTES`, or one larger file. A file of
    many images is not divided, because each part would read it completely."""
    names = min(names, max(1, PART_SIZE_BYTES // image_bytes))
    part, size_bytes = list[FileEntry](), 0
    for unit, unit_bytes in _units(entries, source):
        if part and (len(part) + len(unit) > names or size_bytes + unit_bytes > PART_SIZE_BYTES):
            yield IngestPart.of(part)
            part, size_bytes = [], 0
        part += unit
        size_bytes += unit_bytes
    if part:
        yield IngestPart.of(part)


def _units(entries: Iterable[FileEntry], source: FileSource) -> Iterator[tuple[list[FileEntry], int]]:
    """Yield files or, of packed files, all images together, which stay in one part, with their
    size."""
    if not isinstance(source, PackedFiles):
        return (([entry], entry.size_bytes) for entry in entries)
    units = (list(images) for _, images in groupby(entries, key=lambda entry: source.file_of(entry.name)))
    return ((unit, sum(entry.size_bytes for entry in unit)) for unit in units)


def in_order(plans: list[Iterator[DecodedFiles]], source: FileSource) -> Iterator[DecodedFiles]:
    """Merge the decoded files of several plans, in the order of a single plan."""
    if len(plans) == 1:
        return plans[0]

    def order(file: DecodedFiles) -> tuple[int, str]:
        (name,), (split,) = file.names, file.explicit_splits
        if isinstance(source, PackedFiles):
            return decode_order(name, split, in_order=True), source.file_of(name)
        return decode_order(name, split, in_order=False), name

    files = merge(*((file for part in plan for file in part.pages(1)) for plan in plans), key=order)
    return map(DecodedFiles.joined, batched(files, _MERGED_FILES))
