"""Choose the form in which a dataset stores images. The form of the newest snapshot is used. For
the first snapshot, the form depends on the settings and on a sample of the images."""

import statistics
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property

from evernear.data.database import Database
from evernear.data.decoding import ImageForm, read_image
from evernear.data.manifest import Manifest, is_photographic
from evernear.data.plan import first_by_name, sample
from evernear.data.preprocess import Resize, bit_depth_of, decode_inspected, is_gray
from evernear.data.reduction import BIT_DEPTHS, BitDepth
from evernear.data.sources import ArraySource, FileEntry, FileSource
from evernear.data.sources.packed import PackedFiles
from evernear.errors import DataError, MissingObjectError
from evernear.settings import DataSettings
from evernear.settings.data import LARGEST_SIZE_PX, MAX_SIZE_PX

Shape = tuple[int, int, int]

_SAMPLED_FILES = 101
_SAMPLED_AT_ONCE = 4
_TRIED_FILES = 1000
"""Files to try if none can be decoded, perhaps because none may be read."""
_FIRST_TRANSPOSED = 5  # EXIF orientations 5 to 8 exchange width and height


def choose_form(
    settings: DataSettings,
    source: ArraySource | FileSource,
    db: Database,
    parent: Manifest | None,
    max_size_px: int = MAX_SIZE_PX,
    photo_size_px: int = MAX_SIZE_PX,
) -> ImageForm:
    """Choose the form for the images of ``source``. The listing of the source is in ``db``. The
    limits of the size are those of `evernear.data.ingest.ingest_source`."""
    sample = _Sample(settings, source, db, max_size_px, photo_size_px)
    shape = _shape(settings, sample, parent)
    return ImageForm(shape, _resize(settings, parent), _bit_depth(settings, sample, parent))


def _shape(settings: DataSettings, sample: "_Sample", parent: Manifest | None) -> Shape:
    height, width, channels = sample.shape() if parent is None else parent.shape
    shape = (settings.size_px or height, settings.size_px or width, channels)
    if parent is not None and shape != parent.shape:
        raise DataError(
            f"The dataset {parent.name!r} contains images of {_dimensions(parent.shape)}, but data.size_px asks for "
            f"{_dimensions(shape)}; leave it out, or start over with another --workdir or store."
        )
    return shape


def _dimensions(shape: Shape) -> str:
    return " x ".join(str(n) for n in shape)


def _resize(settings: DataSettings, parent: Manifest | None) -> Resize:
    if parent is None:
        return settings.resize or "auto"
    if settings.resize in (None, parent.resize):
        return parent.resize
    by = "without data.resize" if parent.resize == "auto" else f"by data.resize={parent.resize}"
    raise DataError(
        f"The images of the dataset {parent.name!r} were resized {by}, and the settings ask for {settings.resize};"
        " leave it out, or start over with another --workdir or store."
    )


def _bit_depth(settings: DataSettings, sample: "_Sample", parent: Manifest | None) -> BitDepth:
    asked: BitDepth | None = next((depth for depth in BIT_DEPTHS if depth == settings.bit_depth), None)
    if parent is None:
        return asked or sample.bit_depth()
    if asked not in (None, parent.bit_depth):
        raise DataError(
            f"16-bit images of the dataset {parent.name!r} are read with data.bit_depth={parent.bit_depth}, and the"
            f" settings ask for {asked}; leave it out, or start over with another --workdir or store."
        )
    return parent.bit_depth


class _Sample:
    """Shape and bit depth of a sample of files, which are read only when a method needs them."""

    def __init__(
        self,
        settings: DataSettings,
        source: ArraySource | FileSource,
        db: Database,
        max_size_px: int,
        photo_size_px: int,
    ) -> None:
        self._settings, self._source, self._db = settings, source, db
        self._max_size_px, self._photo_size_px = max_size_px, photo_size_px

    def shape(self) -> Shape:
        """The shape (H, W, C) for the dataset.

        If most images have the same size, the dataset has that size. Otherwise, dataset images are
        square, because photographs can be in portrait or landscape orientation. The side length is
        the median of the shorter sides. No side is longer than ``max_size_px``. Of photographs for
        a pretrained network, the shorter side is limited instead, to ``photo_size_px``, because a
        network sees a center crop of it. If most images are gray, the dataset is gray.
        """
        if not isinstance(self._source, FileSource):
            return *next(self._source.blocks()).images.shape[1:], 1
        first = _first_file_shape(self._source, self._db, self._settings)
        shapes = [shape for shape, _ in self._files]
        sizes = [shape[:2] for shape in shapes]
        height, width = statistics.mode(sizes) if sizes else first[:2]
        if 2 * sizes.count((height, width)) < len(sizes):
            height = width = statistics.median_low(min(size) for size in sizes)
        grays = sum(channels == 1 for *_, channels in shapes)
        channels = (1 if 2 * grays > len(shapes) else 3) if shapes else first[2]
        scale = min(1.0, self._max_size_px / max(height, width))
        if self._photo_size_px > MAX_SIZE_PX and is_photographic((height, width, channels)):
            scale = min(1.0, self._photo_size_px / min(height, width), LARGEST_SIZE_PX / max(height, width))
        return max(1, round(height * scale)), max(1, round(width * scale)), channels

    def bit_depth(self) -> BitDepth:
        """The smallest bit depth for all values in 16-bit files, or 16 if there are none."""
        used: list[BitDepth] = [depth for _, depth in self._files if depth]
        return max(used) if used else 16

    @cached_property
    def _files(self) -> list[tuple[Shape, BitDepth | None]]:
        """Shapes and bit depths. Only 16-bit files are decoded; of others, the header suffices."""
        source = self._source
        if not isinstance(source, FileSource):
            return []

        def describe(image: tuple[FileEntry, bytes | None]) -> tuple[Shape, BitDepth | None] | None:
            with suppress(DataError, MissingObjectError):
                file = read_image(source, image[0], self._settings.max_pixels, image[1])
                turned = file.orientation >= _FIRST_TRANSPOSED
                height, width = (file.width_px, file.height_px) if turned else (file.height_px, file.width_px)
                return (height, width, 1 if is_gray(file) else 3), bit_depth_of(file)
            return None

        with ThreadPoolExecutor(_SAMPLED_AT_ONCE) as pool:
            if isinstance(source, PackedFiles):  # a sample from all images would read all files
                images = source.read_in_order(first_by_name(self._db, _SAMPLED_FILES))
            else:
                images = ((entry, None) for entry in sample(self._db, _SAMPLED_FILES))
            described = pool.map(describe, images)
            return [file for file in described if file is not None]


def _first_file_shape(source: FileSource, db: Database, settings: DataSettings) -> Shape:
    reason, entries = "", first_by_name(db, _TRIED_FILES + 1)
    for entry in entries[:_TRIED_FILES]:
        try:
            image = decode_inspected(read_image(source, entry, settings.max_pixels), 16).image
        except (DataError, MissingObjectError) as error:
            reason = reason or str(error)
        else:
            return image.height, image.width, 1 if image.mode == "L" else 3
    none = f"None of the first {_TRIED_FILES:,} images" if len(entries) > _TRIED_FILES else "No image"
    raise DataError(f"{none} in {settings.source} can be decoded; the first: {reason}")
