"""The Data page: class counts, sample images, changes since the live release, and images that
ingest left out."""

from functools import lru_cache
from io import BytesIO

import numpy as np
from PIL import Image
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from evernear.console.backend import Backend
from evernear.console.web import after_warm_up, page, png
from evernear.data.listing import dataset_name
from evernear.data.manifest import SPLITS, Manifest, find_manifest
from evernear.data.preprocess import Pixels
from evernear.data.shards import Dataset
from evernear.data.snapshots import Snapshots
from evernear.data.sources import open_source
from evernear.errors import DataError, EvernearError
from evernear.release.manifest import ReleaseManifest

PAGE_CLASSES = 24
SAMPLES = 3
_CACHED = 512
_SIDE_PX = 96


class DataPage:
    """The Data page."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._samples = lru_cache(_CACHED)(self._read_samples)
        self._released = lru_cache(4)(self._count)

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/data", after_warm_up(self._show)),
            Route("/data/classes", self._listing),
            Route("/data/sample/{number:int}", self._sample),
        ]

    def _snapshot(self) -> Manifest | None:
        try:
            name = dataset_name(self._backend.settings.data, open_source(self._backend.settings.data.source))
        except EvernearError:
            name = ""
        manifest = Snapshots(self._backend.store, name).head() if name else None
        if manifest is not None:
            return manifest
        trained = self._trained()  # a console in a cluster may have no access to the source
        return Snapshots(self._backend.store, trained.dataset_name).head() if trained else None

    def _trained(self) -> ReleaseManifest | None:
        """The manifest of the live release, or None before the first release."""
        champion = self._backend.releases.champion()
        record = self._backend.releases.find(champion.version) if champion else None
        return record.manifest if record else None

    def _content(self, request: Request, template: str) -> Response:
        manifest = self._snapshot()
        trained = self._trained()
        released = self._released(trained.dataset_name, trained.dataset_digest) if trained else {}
        counts = _counts(manifest) if manifest else {}
        removed = dict.fromkeys(released.keys() - counts.keys(), 0)
        listed = dict(sorted({**counts, **removed}.items()))
        query = request.query_params.get("class", "").strip()
        wanted = [label for label in listed if query.casefold() in label.casefold()]
        number = request.query_params.get("page", "1")
        first = PAGE_CLASSES * (max(1, int(number)) - 1) if number.isdecimal() and len(number) < 6 else 0
        return page(
            request,
            template,
            manifest=manifest,
            counts={label: listed[label] for label in wanted[first : first + PAGE_CLASSES]},
            released=released,
            classes=len(counts),
            removed=sorted(removed),
            images=sum(counts.values()),
            new=max(0, sum(counts.values()) - sum(released.values())) if released else 0,
            number=first // PAGE_CLASSES + 1,
            more=len(wanted) > first + PAGE_CLASSES,
            query=query,
            samples=range(SAMPLES),
            source=self._backend.settings.data.source,
            fault=self._backend.fault,
            **self._waiting(manifest, trained),
        )

    def _waiting(self, manifest: Manifest | None, trained: ReleaseManifest | None) -> dict[str, object]:
        """Classes from review that wait for more images. A console that cannot read the source
        knows those of the newest snapshot."""
        if self._backend.answers or not manifest:
            minimum = self._backend.settings.validation.min_class_images
            return {"waiting": self._backend.waiting(self._backend.latest(), trained), "minimum": minimum}
        return {"waiting": manifest.small_classes.waiting, "minimum": manifest.small_classes.minimum}

    def _show(self, request: Request) -> Response:
        return self._content(request, "data.html.j2")

    def _listing(self, request: Request) -> Response:
        return self._content(request, "class_list.html.j2")

    def _count(self, name: str, digest: str) -> dict[str, int]:
        manifest = find_manifest(self._backend.store, name, digest)
        return _counts(manifest) if manifest else {}

    def _read_samples(self, name: str, digest: str, label: str) -> tuple[bytes, ...]:
        dataset = Dataset.find(self._backend.store, name, digest)
        return _samples(dataset, label) if dataset else ()

    def _sample(self, request: Request) -> Response:
        manifest = self._snapshot()
        label, number = request.query_params.get("class", ""), request.path_params["number"]
        found = list(self._samples(manifest.name, manifest.digest, label)) if manifest else []
        if number >= len(found):
            raise DataError("The class has no such image.")
        return png(found[number])


def _counts(manifest: Manifest) -> dict[str, int]:
    """The number of images in each nonempty class, keyed by class name."""
    return dict(sorted(manifest.images_by_class().items()))


def _samples(dataset: Dataset, label: str) -> tuple[bytes, ...]:
    """The first `SAMPLES` images of a class, as PNG files."""
    found: list[bytes] = []
    for split in SPLITS:
        for shard in dataset.shards(split):
            if not shard.label_counts.get(label):
                continue
            for block in dataset.shard_blocks(shard):
                for row in np.flatnonzero(block.labels == dataset.labels.index(label))[: SAMPLES - len(found)]:
                    found.append(_png(block.images[int(row)]))
                if len(found) == SAMPLES:
                    return tuple(found)
    return tuple(found)


def _png(pixels: Pixels) -> bytes:
    image = Image.fromarray(np.squeeze(pixels))
    image.thumbnail((_SIDE_PX, _SIDE_PX))
    buffer = BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
