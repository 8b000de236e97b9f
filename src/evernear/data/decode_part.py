"""A part of an ingest (`evernear.common.parts`), which decodes and hashes some of the
files. Parts are processed independently of each other.

::

    <folder>/...              the plan, its parts and their results
    <folder>/<sha256>.raw     the pixels of one part's images

The result of a part describes each of its files, in decoding order, and contains the
name of the object with the pixels.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evernear.common.disk import disk_errors, sha256_file
from evernear.common.frozen import Frozen
from evernear.common.parts import Part, Parts, Worker, concurrently
from evernear.common.threads import available_cpus
from evernear.data.batch import images_at_once
from evernear.data.decoding import DecodedImage, DecodeFailure, Decoder, ImageForm
from evernear.data.preprocess import Flaw, Pixels
from evernear.data.sources import FileEntry, FileSource, open_source
from evernear.data.sqlite import batched
from evernear.errors import DataError, IntegrityError, MissingObjectError, StoreError
from evernear.settings import DataSettings

KIND = "ingest"


class LostPartsError(StoreError):
    """The parts of this ingest, or their results, are missing from the store."""


class IngestPart(Part):
    """Files to decode, in the order of decoding. Each unit is a file."""

    entries: tuple[FileEntry, ...]


class Shared(Frozen):
    """The settings and the image form, which are the same for all parts."""

    settings: DataSettings
    form: ImageForm


class Outcome(NamedTuple):
    """The outcome of decoding one file. If ``digest`` is set, the file is an image. If
    ``fault`` is set, the file is broken. Otherwise, the file is not an image.
    """

    position: int
    """Position of the file in the part."""
    digest: str = ""
    width_px: int = 0
    height_px: int = 0
    flaws: int = 0
    fault: str | None = None


class DecodedPart(Frozen):
    """The result of a part."""

    outcomes: tuple[Outcome, ...]
    """The outcomes in decoding order."""
    pixels: str = ""
    """The name of the object with the images' pixels, as a uint8 array of shape (N, H,
    W, C) without a header. Empty if the part has no images.
    """
    sha256: str = ""


def open_here(
    source: FileSource, settings: DataSettings, form: ImageForm, on_files: Callable[[int], None], parts: Parts
) -> Worker:
    """Return a worker that uses ``source`` to decode parts. Bind all arguments except
    the last one to get an `OpenWorker`.

    ``on_files`` is called with the number of files decoded since the previous call.
    """
    return partial(_decode_part, source, settings, form, on_files, parts)


def open_worker(parts: Parts) -> Worker:
    """Open the source and return a worker. Unlike `open_here`, this function runs in a
    different process or on a different machine.
    """
    shared = Shared.model_validate(parts.plan.shared)
    source = open_source(shared.settings.source, shared.settings)
    if not isinstance(source, FileSource):
        raise DataError(f"{shared.settings.source} has no files to decode.")
    return open_here(source, shared.settings, shared.form, lambda _: None, parts)


def _decode_part(
    source: FileSource,
    settings: DataSettings,
    form: ImageForm,
    on_files: Callable[[int], None],
    parts: Parts,
    number: int,
    value: bytes,
) -> bytes:
    """Decode a part, and write the pixels to the store under their sha256. Return the
    part's `DecodedPart` as JSON.
    """
    part = IngestPart.from_json(value, f"part {number} in {parts.store.uri}")
    positions = {entry.name: position for position, entry in enumerate(part.entries)}
    requests, threads, at_once = (
        settings.requests_in_flight,
        settings.decode_threads or available_cpus(),
        images_at_once(form),
    )
    decoder, outcomes = Decoder(source, form, settings.max_pixels), list[Outcome]()
    with tempfile.TemporaryDirectory(prefix="evernear-ingest-") as scratch:
        path = Path(scratch) / "pixels.raw"
        decoded = decoder.decode_all(iter(part.entries), requests, threads, max(requests, at_once))
        with closing(decoded) as results:
            for batch in batched(results, at_once):
                outcomes += [_outcome(result, positions[result.entry.name]) for result in batch]
                _append(path, (result.pixels for result in batch if isinstance(result, DecodedImage)))
                on_files(len(batch))
        if not any(outcome.digest for outcome in outcomes):
            return DecodedPart(outcomes=tuple(outcomes)).to_json()
        sha256 = sha256_file(path)
        key = f"{parts.folder}/{sha256}.raw"
        parts.store.put(key, path)
    return DecodedPart(outcomes=tuple(outcomes), pixels=key, sha256=sha256).to_json()


def _outcome(result: DecodedImage | DecodeFailure, position: int) -> Outcome:
    if isinstance(result, DecodeFailure):
        return Outcome(position, fault=result.reason)
    return Outcome(position, result.digest.hex(), *result.size, int(result.flaws))


def _append(path: Path, images: Iterable[Pixels]) -> None:
    # The file is opened for each batch, so that a failed part leaves no open file.
    with disk_errors(path), path.open("ab") as file:
        for pixels in images:
            file.write(pixels.tobytes())


def stored_outcomes(parts: Parts) -> Iterator[tuple[FileEntry, Outcome]]:
    """Yield each file of the finished parts with its outcome, in decoding order.

    Raises:
        LostPartsError: an object of a part is missing or damaged.
    """
    for part, decoded in concurrently(lambda number: _stored_part(parts, number), _numbers(parts)):
        yield from ((part.entries[outcome.position], outcome) for outcome in decoded.outcomes)


def stored_results(parts: Parts, scratch: Path) -> Iterator[DecodedImage | DecodeFailure]:
    """Yield the results of `Decoder.decode_all` for the files in the finished parts.
    The pixels of at most three parts are on disk at the same time.

    Raises:
        LostPartsError: an object of a part is missing or damaged.
    """
    shape = Shared.model_validate(parts.plan.shared).form.shape

    def fetch(number: int) -> tuple[IngestPart, DecodedPart, Path]:
        part, decoded = _stored_part(parts, number)
        path = scratch / f"{parts.plan.id}-{number}.raw"
        if decoded.pixels:
            try:
                parts.store.fetch(decoded.pixels, path, decoded.sha256)
            except (IntegrityError, MissingObjectError) as error:
                raise LostPartsError(str(error)) from error
        return part, decoded, path

    for part, decoded, path in concurrently(fetch, _numbers(parts), ahead=1):
        images = iter(np.empty((0, *shape), np.uint8))
        if decoded.pixels:
            images = iter(np.asarray(np.memmap(path, np.uint8, "r").reshape(-1, *shape)))
            path.unlink()  # the memory mapping stays valid
        for position, digest, width, height, flaws, fault in decoded.outcomes:
            entry = part.entries[position]
            if digest:
                yield DecodedImage(entry, bytes.fromhex(digest), (width, height), Flaw(flaws), next(images))
            else:
                yield DecodeFailure(entry, fault)


def _stored_part(parts: Parts, number: int) -> tuple[IngestPart, DecodedPart]:
    where = f"part {number} in {parts.store.uri}/{parts.folder}"
    try:
        result = parts.result(number)
        if result is None:
            raise LostPartsError(f"The result of {where} does not exist.")
        return IngestPart.from_json(parts.part(number), where), DecodedPart.from_json(result, where)
    except (IntegrityError, MissingObjectError) as error:
        raise LostPartsError(str(error)) from error


def _numbers(parts: Parts) -> list[int]:
    """The indices of the finished parts."""
    missing = set(parts.missing())
    return [number for number in range(parts.plan.parts) if number not in missing]
