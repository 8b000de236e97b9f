"""The gallery of an index: the gallery split, then the train images that join it, in the order of the index's rows.

See docs/decisions/0002-splits-and-gallery.md and 0078-neighbors-as-pictures.md.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from evernear.data.manifest import Manifest, Shard, Split
from evernear.data.shards import Block, Dataset
from evernear.errors import IntegrityError

MIN_GALLERY_IMAGES = 10
"""A class with fewer images in the gallery is filled up to this number with train images."""


def joining_gallery(manifest: Manifest, untrained: Collection[str] = ()) -> dict[str, int]:
    """The number of train images of each label that join the gallery, as many as there are.

    ``untrained`` are classes that the network was not trained on: all their train images join.
    """
    gallery = manifest.label_counts("gallery")
    return {
        label: count if label in untrained else min(count, max(0, MIN_GALLERY_IMAGES - gallery[label]))
        for label, count in manifest.label_counts("train").items()
    }


def image_blocks(
    dataset: Dataset, split: Split, batch_size: int, joining: Mapping[str, int]
) -> Iterator[tuple[Iterator[Block], int]]:
    """Yield the blocks and image count of each shard to embed for ``split``, in the order of the embeddings.

    The gallery ends with train images: the first ``joining`` of each label, as far as there are so many.
    """
    for shard in dataset.shards(split):
        yield dataset.shard_blocks(shard, batch_size), shard.count
    if split == "gallery":
        for shard, taken in _joining_shards(dataset, joining):
            yield _first(dataset, shard, taken, batch_size), taken.total()


class GalleryPlace(NamedTuple):
    """Where an image of the gallery is: at a position in a shard, of those that are ``taken`` of it, or of all."""

    shard: Shard
    position: int
    taken: Counter[str] | None


def gallery_place(dataset: Dataset, joined: Mapping[str, int], row: int) -> GalleryPlace:
    """Where the image in ``row`` of an index is; reads no shard.

    ``joined`` are the numbers of train images of each label that follow the gallery split, as in `image_blocks`.

    Raises:
        IntegrityError: the index has no such row.
    """
    position = row
    for shard in dataset.shards("gallery") if row >= 0 else ():
        if position < shard.count:
            return GalleryPlace(shard, position, None)
        position -= shard.count
    for shard, taken in _joining_shards(dataset, joined) if row >= 0 else ():
        if position < taken.total():
            return GalleryPlace(shard, position, taken)
        position -= taken.total()
    raise IntegrityError(f"The gallery of the snapshot {dataset.digest[:12]} has no row {row}.")


def image_at(dataset: Dataset, place: GalleryPlace) -> Block:
    """The image at a place, as a block of one.

    Raises:
        IntegrityError: the shard is missing or damaged.
    """
    if place.taken is None:
        return dataset.image(place.shard, place.position)
    position = place.position
    for block in _first(dataset, place.shard, place.taken, 4096):
        if position < len(block):
            one = slice(position, position + 1)
            return Block(block.images[one], block.labels[one], block.digests[one])
        position -= len(block)
    raise IntegrityError(f"The shard {place.shard.sha256} does not have the images that its manifest counts.")


def _joining_shards(dataset: Dataset, joining: Mapping[str, int]) -> Iterator[tuple[Shard, Counter[str]]]:
    """The train shards with images that join the gallery, and the number of these of each label."""
    missing = Counter(joining)
    for shard in dataset.shards("train"):
        taken = Counter(shard.label_counts) & missing
        missing -= taken
        if taken:
            yield shard, taken


def _first(dataset: Dataset, shard: Shard, taken: Counter[str], batch_size: int) -> Iterator[Block]:
    """The first images of a shard, as many of each label as are ``taken``."""
    counts = Counter({dataset.labels.index(label): count for label, count in taken.items()})
    for block in dataset.shard_blocks(shard, batch_size):
        rows: list[int] = []
        for row, number in enumerate(block.labels.tolist()):
            if counts[number]:
                counts[number] -= 1
                rows.append(row)
        if rows:
            yield Block(block.images[rows], block.labels[rows], block.digests[rows])
