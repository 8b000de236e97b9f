"""Find test images that are nearly identical to an image from which a release is built, such as
frames of one scene.

Two images are near-duplicates if the correlation of their 16 x 16 gray pixels is at least
`CORRELATION`. This comparison ignores shifts by one pixel, differences in brightness, and JPEG
noise. Simple images can look alike without showing the same scene. A share of up to `MAX_SHARE` is
therefore not considered a leak. See docs/decisions/0026-groups.md for the measurement.
"""

import base64
import io
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from evernear.common.frozen import Document, Frozen
from evernear.common.output import quantity
from evernear.data.groups import propose_group
from evernear.data.manifest import Shard, Split
from evernear.data.preprocess import Pixels
from evernear.data.shards import Block, Dataset

SIDE_PX = 16
CORRELATION = 0.99
MAX_SHARE = 0.3
TEST_MAX = 2_000
MAX_READ_BYTES = 2**31
"""About 3 million images of 28 x 28 gray pixels, or 14,000 of 224 x 224 color pixels."""
MAX_PAIRS = 6
_NAMED_PAIRS = 200
_TILE_PX = 96
_BLOCK_BYTES = 2**23
_SEEN: tuple[Split, ...] = ("train", "gallery")


class NearDuplicatePair(Frozen):
    test: str
    seen: str
    correlation: float


class NearDuplicatePairs(Document):
    """Pictures for the run page, which `evernear forget` deletes with it."""

    remedy = "run the validate step again"

    pairs: tuple[NearDuplicatePair, ...]


class NearDuplicates(Frozen):
    """The number of test images that have a near-duplicate in the train or gallery split."""

    found: int
    compared: int
    test_images: int
    seen: int
    """Number of train and gallery images with which the test images were compared."""
    seen_images: int
    advice: str = ""
    """Advice on how to keep near-duplicates in one split. Empty up to `MAX_SHARE`."""

    @property
    def is_leak(self) -> bool:
        """Whether so many indicate that scenes are in test and in train or gallery."""
        return self.found > MAX_SHARE * self.compared

    def sentence(self) -> str:
        of = f"{self.compared:,} of {quantity(self.test_images, 'test image')}"
        of = of if self.compared < self.test_images else quantity(self.test_images, "test image")
        where = f" {self.seen:,} of the images of" if self.seen < self.seen_images else ""
        share = self.found / max(1, self.compared)
        return (
            f"{share:.0%} of {of} are nearly the same as an image of{where} train or gallery (at most {MAX_SHARE:.0%}"
            f" is usual), as frames of one scene are, so accuracy on new scenes may be far lower. {self.advice}"
        ).rstrip()


def find_near_duplicates(dataset: Dataset, group: str = "") -> tuple[NearDuplicates, NearDuplicatePairs]:
    """Compare at most `TEST_MAX` test images with at most `MAX_READ_BYTES` of train and gallery
    images, evenly spaced, in constant memory. Return some of the pairs. ``group`` is
    ``data.group``."""
    total = dataset.count("test")
    step = max(1, -(-total // TEST_MAX))
    tests = [_every(block, step, start) for start, block in _numbered(_blocks(dataset, dataset.shards("test")))]
    seen_images = sum(map(dataset.count, _SEEN))
    if not total or not seen_images:
        none = NearDuplicates(found=0, compared=0, test_images=total, seen=0, seen_images=seen_images)
        return none, NearDuplicatePairs(pairs=())
    digests = np.concatenate([digests for _, digests in tests])
    queries = np.concatenate([vectors for vectors, _ in tests])
    best = np.zeros(len(queries), np.float32)
    partners = np.zeros_like(digests)
    pictures: dict[int, tuple[str, float]] = {}
    seen = 0
    for block in _blocks(dataset, _spread(dataset)):
        seen += len(block)
        similar = queries @ reduced(block.images).T
        nearest = similar.argmax(axis=1)
        highest = similar[np.arange(len(queries)), nearest]
        for row in np.flatnonzero((highest >= CORRELATION) & (best < CORRELATION))[: MAX_PAIRS - len(pictures)]:
            pictures[int(row)] = _picture(block.images[nearest[row]]), float(highest[row])
        better = highest > best
        best[better], partners[better] = highest[better], block.digests[nearest[better]]
    rows = np.flatnonzero(best >= CORRELATION)
    result = NearDuplicates(
        found=len(rows),
        compared=len(queries),
        test_images=total,
        seen=seen,
        seen_images=seen_images,
    )
    pairs = NearDuplicatePairs(pairs=_pairs(dataset, digests, pictures))
    if not result.is_leak:
        return result, pairs
    named = [(digests[row].tobytes(), partners[row].tobytes()) for row in rows[:_NAMED_PAIRS]]
    advice = propose_group(dataset, named, result.found / result.compared, group)
    return result.model_copy(update={"advice": advice}), pairs


def reduced(images: Pixels) -> NDArray[np.float32]:
    """Reduce images (N, H, W, C) to gray averages over 16 x 16 areas (N, D). The averages are
    standardized so that dot products are correlations. Constant images become zeros."""
    count, height, width, channels = images.shape
    rows, columns = (_areas(side, min(SIDE_PX, side)) for side in (height, width))
    # Averages columns and channels together, much faster than a mean of channels.
    columns = np.repeat(columns / channels, channels, axis=1)
    pixels = images.reshape(count, height, width * channels).astype(np.float32)
    vectors = (rows @ (pixels @ columns.T)).reshape(count, -1)
    vectors -= vectors.mean(axis=1, keepdims=True)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.where(lengths > 1e-3, vectors / np.maximum(lengths, 1e-3), 0).astype(np.float32)


def _areas(size: int, parts: int) -> NDArray[np.float32]:
    """A matrix (``parts``, ``size``) that averages as adaptive average pooling does."""
    weights = np.zeros((parts, size), np.float32)
    for part in range(parts):
        start, stop = part * size // parts, -(-(part + 1) * size // parts)
        weights[part, start:stop] = 1 / (stop - start)
    return weights


def _blocks(dataset: Dataset, shards: list[Shard]) -> Iterator[Block]:
    block_size = max(1, min(4096, _BLOCK_BYTES // int(np.prod(dataset.shape))))
    for shard in shards:
        yield from dataset.shard_blocks(shard, block_size)


def _numbered(blocks: Iterator[Block]) -> Iterator[tuple[int, Block]]:
    start = 0
    for block in blocks:
        yield start, block
        start += len(block)


def _every(block: Block, step: int, start: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Every ``step``-th image of a split, for a block that begins at position ``start``."""
    chosen = slice(-start % step, None, step)
    return reduced(block.images[chosen]), block.digests[chosen]


def _spread(dataset: Dataset) -> list[Shard]:
    """Evenly spaced shards of the train and gallery splits, of about `MAX_READ_BYTES` in total."""
    shards = [shard for split in _SEEN for shard in dataset.shards(split)]
    return shards[:: -(-sum(shard.size_bytes for shard in shards) // MAX_READ_BYTES)]


def _pairs(
    dataset: Dataset, digests: NDArray[np.uint8], pictures: dict[int, tuple[str, float]]
) -> tuple[NearDuplicatePair, ...]:
    """The pairs in ``pictures``. The test images are read again to get their pictures."""
    wanted = {digests[row].tobytes(): seen for row, seen in pictures.items()}
    pairs: list[NearDuplicatePair] = []
    for block in _blocks(dataset, dataset.shards("test")) if wanted else ():
        for row, digest in enumerate(block.digests):
            if found := wanted.pop(digest.tobytes(), None):
                seen, correlation = found
                pairs.append(NearDuplicatePair(test=_picture(block.images[row]), seen=seen, correlation=correlation))
        if not wanted:
            break
    return tuple(pairs)


def _picture(image: Pixels) -> str:
    picture = Image.fromarray(image.squeeze(axis=2) if image.shape[2] == 1 else image)
    picture.thumbnail((_TILE_PX, _TILE_PX))
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", quality=80)
    return base64.b64encode(buffer.getvalue()).decode()
