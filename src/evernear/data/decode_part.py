"""A part of an ingest (`evernear.common.parts`), which decodes and hashes some of the files. Parts
are processed independently of each other.

::

    <folder>/...              the plan, its parts and their results
    <folder>/<sha256>.raw     the pixels of one part's images

The result of a part describes each of its files, in decoding order, and contains the name of the
object with the pixels. Parts and results are stored as columns, because columns are parsed faster
than rows.
"""

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from evernear.common.disk import disk_errors, sha256_file
from evernear.common.frozen import Frozen
from evernear.common.parts import Part, Parts, Worker, concurrently
from evernear.common.processes import available_cpus
from evernear.data.decoding import DecodedImage, DecodeFailure, Decoder, ImageForm
from evernear.data.manifest import Split
from evernear.data.preprocess import Pixels, pixels_digest, to_array
from evernear.data.sources import ArrayBlock, FileEntry, FileSource, open_source
from evernear.data.sqlite import batched
from evernear.errors import DataError, IntegrityError, MissingObjectError
from evernear.settings import DataSettings

KIND = "ingest"
REQUESTS_IN_FLIGHT = 32
"""Files to read concurrently. A bucket that answers in 20 ms limits two readers to 79 images per
second, which is less than a CPU decodes (benchmarks/results/scale_ingest.md)."""


class IngestPart(Part):
    """Files in the order of decoding, with a column for each field of `FileEntry`. Columns are
    parsed faster than rows."""

    columns: tuple[
        tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[Split | None, ...], tuple[int, ...], tuple[str, ...]
    ]

    @classmethod
    def of(cls, entries: Sequence[FileEntry]) -> "IngestPart":
        return cls.model_validate({"units": len(entries), "columns": [*zip(*entries, strict=True)]})

    @property
    def entries(self) -> list[FileEntry]:
        return [FileEntry(*row) for row in zip(*self.columns, strict=True)]


class Shared(Frozen):
    settings: DataSettings
    form: ImageForm


class Outcome(NamedTuple):
    """With a digest, the file is an image; with a fault, it is broken; otherwise, it is no
    image."""

    position: int
    digest: str = ""
    width_px: int = 0
    height_px: int = 0
    flaws: int = 0
    fault: str | None = None


class DecodedPart(Frozen):
    """The result of a part, with a column for each field of `Outcome`."""

    columns: tuple[
        tuple[int, ...], tuple[str, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[str | None, ...]
    ]
    pixels: str = ""
    """The key of the pixels: uint8 (N, H, W, C) without a header. Empty without images."""
    sha256: str = ""

    @classmethod
    def of(cls, outcomes: Iterable[Outcome], pixels: str = "", sha256: str = "") -> "DecodedPart":
        columns = [*zip(*outcomes, strict=True)]
        return cls.model_validate({"columns": columns, "pixels": pixels, "sha256": sha256})


@dataclass(frozen=True)
class DecodedFiles:
    """Decoded files, in decoding order. Each sequence contains one value for every file. The digest
    is empty if the file is broken or not an image. The fault is None if the file is not broken.
    ``pixels`` is a uint8 array of shape (N, H, W, C) with the N images among the files."""

    names: Sequence[str]
    etags: Sequence[str]
    explicit_splits: Sequence[Split | None]
    digests: Sequence[bytes]
    widths_px: Sequence[int]
    heights_px: Sequence[int]
    flaws: Sequence[int]
    faults: Sequence[str | None]
    pixels: Pixels

    def pages(self, size: int) -> Iterator["DecodedFiles"]:
        first = 0
        for start in range(0, len(self.names), size):
            columns = [column[start : start + size] for column in self._columns()]
            images = sum(map(bool, self.digests[start : start + size]))
            yield DecodedFiles(*columns, pixels=self.pixels[first : first + images])
            first += images

    @staticmethod
    def joined(pages: Sequence["DecodedFiles"]) -> "DecodedFiles":
        columns = zip(*(page._columns() for page in pages), strict=True)
        return DecodedFiles(
            *([*chain.from_iterable(column)] for column in columns),
            pixels=np.concatenate([page.pixels for page in pages]),
        )

    def _columns(self) -> tuple[Sequence[Any], ...]:
        sizes = self.widths_px, self.heights_px
        return self.names, self.etags, self.explicit_splits, self.digests, *sizes, self.flaws, self.faults


def open_here(
    source: FileSource, settings: DataSettings, form: ImageForm, on_files: Callable[[int], None], parts: Parts
) -> Worker:
    """Bind all arguments but the last to get an `OpenWorker`. ``on_files`` receives the number of
    files decoded since its last call."""
    return partial(_decode_part, source, settings, form, on_files, parts)


def open_worker(parts: Parts) -> Worker:
    """Like `open_here`, but opens the source, in another process or on another machine."""
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
    """Decode a part, store the pixels by their sha256, and return its `DecodedPart` as JSON."""
    part = IngestPart.from_json(value, f"part {number} in {parts.store.uri}")
    positions = {entry.name: position for position, entry in enumerate(part.entries)}
    at_once, threads = images_at_once(form), available_cpus()
    lookahead = max(REQUESTS_IN_FLIGHT, at_once)
    decoder, outcomes = Decoder(source, form, settings.max_pixels), list[Outcome]()
    with tempfile.TemporaryDirectory(prefix="evernear-ingest-") as scratch:
        path = Path(scratch) / "pixels.raw"
        decoded = decoder.decode_all(iter(part.entries), REQUESTS_IN_FLIGHT, threads, lookahead)
        with closing(decoded) as results:
            for batch in batched(results, at_once):
                outcomes += [_outcome(result, positions[result.entry.name]) for result in batch]
                _append(path, (result.pixels for result in batch if isinstance(result, DecodedImage)))
                on_files(len(batch))
        if not any(outcome.digest for outcome in outcomes):
            return DecodedPart.of(outcomes).to_json()
        sha256 = sha256_file(path)
        key = f"{parts.folder}/{sha256}.raw"
        parts.store.put(key, path)
    return DecodedPart.of(outcomes, key, sha256).to_json()


def _outcome(result: DecodedImage | DecodeFailure, position: int) -> Outcome:
    if isinstance(result, DecodeFailure):
        return Outcome(position, fault=result.reason)
    return Outcome(position, result.digest.hex(), *result.size, int(result.flaws))


def _append(path: Path, images: Iterable[Pixels]) -> None:
    # The file is opened for each batch, so that a failed part leaves no open file.
    with disk_errors(path), path.open("ab") as file:
        for pixels in images:
            file.write(pixels.tobytes())


def decoded_names(parts: Parts) -> Iterator[tuple[str, str]]:
    for part, decoded in concurrently(partial(_stored_part, parts), _numbers(parts)):
        names, etags, *_ = part.columns
        positions, *_, faults = decoded.columns
        for position, fault in zip(positions, faults, strict=True):
            if fault is None:
                yield names[position], etags[position]


def stored_results(parts: Parts, scratch: Path) -> Iterator[DecodedFiles]:
    """Yield the decoded files of finished parts. At most three parts' pixels are on disk."""
    shape = Shared.model_validate(parts.plan.shared).form.shape

    def fetch(number: int) -> tuple[IngestPart, DecodedPart, Path]:
        part, decoded = _stored_part(parts, number)
        path = scratch / f"{parts.plan.id}-{number}.raw"
        if decoded.pixels:
            try:
                parts.store.fetch(decoded.pixels, path, decoded.sha256)
            except (IntegrityError, MissingObjectError) as error:
                raise MissingObjectError(str(error)) from error
        return part, decoded, path

    for part, decoded, path in concurrently(fetch, _numbers(parts), ahead=1):
        pixels = np.empty((0, *shape), np.uint8)
        if decoded.pixels:
            pixels = np.asarray(np.memmap(path, np.uint8, "r").reshape(-1, *shape))
            path.unlink()  # the memory mapping stays valid
        names, etags, _, explicit_splits, *_ = part.columns
        positions, digests, widths_px, heights_px, flaws, faults = decoded.columns
        yield DecodedFiles(
            names=[names[position] for position in positions],
            etags=[etags[position] for position in positions],
            explicit_splits=[explicit_splits[position] for position in positions],
            digests=[bytes.fromhex(digest) for digest in digests],
            widths_px=widths_px,
            heights_px=heights_px,
            flaws=flaws,
            faults=faults,
            pixels=pixels,
        )


def _stored_part(parts: Parts, number: int) -> tuple[IngestPart, DecodedPart]:
    where = f"part {number} in {parts.store.uri}/{parts.folder}"
    try:
        result = parts.result(number)
        if result is None:
            raise MissingObjectError(f"The result of {where} does not exist.")
        return IngestPart.from_json(parts.part(number), where), DecodedPart.from_json(result, where)
    except (IntegrityError, MissingObjectError) as error:
        raise MissingObjectError(str(error)) from error


def _numbers(parts: Parts) -> list[int]:
    missing = set(parts.missing())
    return [number for number in range(parts.plan.parts) if number not in missing]


_MAX_IMAGES = 500
_MAX_BYTES = 16 * 2**20


def images_at_once(form: ImageForm) -> int:
    return max(1, min(_MAX_IMAGES, _MAX_BYTES // math.prod(form.shape)))


@dataclass(frozen=True)
class Batch:
    """Images that are ready for a shard: ``pixels`` is a uint8 array (N, H, W, C)."""

    names: Sequence[str]
    labels: Sequence[str]
    explicit_splits: Sequence[Split | None]
    digests: Sequence[bytes]
    widths_px: Sequence[int]
    heights_px: Sequence[int]
    flaws: Sequence[int]
    pixels: Pixels
    former_splits: Mapping[str, Split] = field(default_factory=dict[str, Split])
    """Maps file names to former splits, for unchanged files that are decoded again."""

    @classmethod
    def of_arrays(cls, block: ArrayBlock, form: ImageForm) -> "Batch":
        """Pillow is only used to resize the images."""
        shape, resize = form.shape, form.resize
        count, height, width = block.images.shape
        flat = block.images.reshape(count, -1)
        if (height, width) == shape[:2]:
            pixels = np.repeat(block.images[..., None], shape[2], axis=3)
        else:
            pixels = np.stack([to_array(Image.fromarray(image), *shape, resize) for image in block.images])
        return cls(
            names=block.names,
            labels=block.labels,
            explicit_splits=[block.explicit_split] * count,
            digests=[pixels_digest("L", width, height, row.tobytes()) for row in flat],
            widths_px=[width] * count,
            heights_px=[height] * count,
            flaws=(flat.min(axis=1) == flat.max(axis=1)).astype(int).tolist(),
            pixels=pixels,
        )
