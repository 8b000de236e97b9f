"""The gallery of an index. In the order of the index's rows, the gallery contains the images in the
gallery split, then the train images that join the gallery. See
docs/decisions/0002-splits-and-gallery.md and 0016-reindex.md."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from evernear.data.manifest import Manifest, Shard, Split
from evernear.data.shards import Block, Dataset
from evernear.errors import IntegrityError

MIN_GALLERY_IMAGES = 10
"""Fewest images per class in the gallery. Train images fill it up."""
FINE_TUNED_GALLERY_IMAGES = 100
"""The same for a fine-tuned network. It knows its train images better than others, but with as few
steps as fine-tuning takes, not much better (docs/decisions/0002-splits-and-gallery.md)."""


def joining_gallery(
    manifest: Manifest, untrained: Collection[str] = (), fewest: int = MIN_GALLERY_IMAGES
) -> dict[str, int]:
    """For each label, the number of train images that join the gallery, so that it has ``fewest``.
    ``untrained`` contains classes that the network was not trained on. All their train images
    join."""
    gallery = manifest.label_counts("gallery")
    return {
        label: count if label in untrained else min(count, max(0, fewest - gallery[label]))
        for label, count in manifest.label_counts("train").items()
    }


@dataclass(frozen=True)
class ShardImages:
    """Images of one shard, either all images or the first ``taken`` images of each label."""

    shard: Shard
    taken: Counter[str] | None

    @property
    def count(self) -> int:
        return self.shard.count if self.taken is None else self.taken.total()

    def blocks(self, dataset: Dataset, batch_size: int) -> Iterator[Block]:
        if self.taken is None:
            return dataset.shard_blocks(self.shard, batch_size)
        return _first(dataset, self.shard, self.taken, batch_size)


def images_to_embed(dataset: Dataset, split: Split, joining: Mapping[str, int]) -> Iterator[ShardImages]:
    """Yield the images to embed for ``split``, in the order of the embeddings. No shard is read.
    The gallery ends with train images, at most the first ``joining`` images of each label."""
    for shard in dataset.shards(split):
        yield ShardImages(shard, None)
    if split == "gallery":
        yield from _joining_shards(dataset, joining)


def image_blocks(
    dataset: Dataset, split: Split, batch_size: int, joining: Mapping[str, int]
) -> Iterator[tuple[Iterator[Block], int]]:
    for images in images_to_embed(dataset, split, joining):
        yield images.blocks(dataset, batch_size), images.count


class GalleryPlace(NamedTuple):
    """The location of a gallery image, which includes its position among the images of a shard."""

    images: ShardImages
    position: int


def gallery_place(dataset: Dataset, joined: Mapping[str, int], row: int) -> GalleryPlace:
    """Find the image in ``row`` of an index, without reading a shard. ``joined`` contains the
    number of train images of each label that follow the gallery split, as in `image_blocks`."""
    position = row
    for images in images_to_embed(dataset, "gallery", joined) if row >= 0 else ():
        if position < images.count:
            return GalleryPlace(images, position)
        position -= images.count
    raise IntegrityError(f"The gallery of the snapshot {dataset.digest[:12]} has no row {row}.")


def image_at(dataset: Dataset, place: GalleryPlace) -> Block:
    shard, position = place.images.shard, place.position
    if place.images.taken is None:
        return dataset.image(shard, position)
    for block in place.images.blocks(dataset, 4096):
        if position < len(block):
            return block.select(slice(position, position + 1))
        position -= len(block)
    raise IntegrityError(f"The shard {shard.sha256} does not have the images that its manifest counts.")


def _joining_shards(dataset: Dataset, joining: Mapping[str, int]) -> Iterator[ShardImages]:
    missing = Counter(joining)
    for shard in dataset.shards("train"):
        taken = Counter(shard.label_counts) & missing
        missing -= taken
        if taken:
            yield ShardImages(shard, taken)


def _first(dataset: Dataset, shard: Shard, taken: Counter[str], batch_size: int) -> Iterator[Block]:
    counts = Counter({dataset.labels.index(label): count for label, count in taken.items()})
    for block in dataset.shard_blocks(shard, batch_size):
        rows: list[int] = []
        for row, number in enumerate(block.labels.tolist()):
            if counts[number]:
                counts[number] -= 1
                rows.append(row)
        if rows:
            yield block.select(rows)
