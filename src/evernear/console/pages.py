"""The Try page recognizes an image and sends it to review. The Data page shows class counts, sample
images, changes since the live release, and images that ingest left out. The Releases page promotes
a release or rolls back, with a reason."""

import shlex
from collections.abc import Callable
from functools import lru_cache

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from evernear.common.store import FileStore, Store
from evernear.console.access import User, require
from evernear.console.backend import PAGE_RELEASES, Backend
from evernear.console.class_page import TILE_PX, encoded
from evernear.console.runs import Done
from evernear.console.web import Form, Predictor, action, field, list_page, page, png
from evernear.data.books import opened_books
from evernear.data.example_queries import duckdb_query, pandas_query
from evernear.data.manifest import Manifest, find_manifest
from evernear.data.shards import Dataset
from evernear.data.snapshots import DATASETS
from evernear.errors import DataError, SettingsError
from evernear.release.manifest import ReleaseManifest
from evernear.serving.responses import Prediction

PAGE_CLASSES = 24
SAMPLES = 3
_CACHED = 512
SHOWN_NEIGHBORS = 6
FORGOTTEN = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 96 96" role="img" aria-label="forgotten">
<rect width="96" height="96" fill="#8884"/>
<text x="48" y="52" text-anchor="middle" font-family="sans-serif" font-size="14" fill="#888">forgotten</text></svg>"""
"""Placeholder for an image that the store no longer has."""


class DataPage:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._samples = lru_cache(_CACHED)(self._read_samples)
        self._released = lru_cache(4)(self._count)

    def routes(self) -> list[Route]:
        return [
            Route("/data", self._show),
            Route("/data/classes", self._listing),
            Route("/data/sample/{number:int}", self._sample),
        ]

    def _content(self, request: Request, template: str) -> Response:
        manifest = self._backend.snapshot()
        trained = self._backend.live()
        released = self._released(trained.dataset_name, trained.dataset_digest) if trained else {}
        counts = _counts(manifest) if manifest else {}
        removed = dict.fromkeys(released.keys() - counts.keys(), 0)
        listed = dict(sorted({**counts, **removed}.items()))
        query = request.query_params.get("class", "").strip()
        wanted = [label for label in listed if query.casefold() in label.casefold()]
        number, pages = list_page(request, len(wanted), PAGE_CLASSES)
        first = PAGE_CLASSES * (number - 1)
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
            number=number,
            pages=pages,
            query=query,
            samples=range(SAMPLES),
            source=self._backend.settings.data.source,
            renamed=self._backend.renamed(),
            fault=self._backend.fault,
            **_queries(self._backend.store, manifest),
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
        return _samples(self._backend.dataset(name, digest), label)

    def _sample(self, request: Request) -> Response:
        manifest = self._backend.snapshot()
        label, number = request.query_params.get("class", ""), request.path_params["number"]
        found = list(self._samples(manifest.name, manifest.digest, label)) if manifest else []
        if number >= len(found):
            raise DataError("The class has no such image.")
        return png(found[number])


def _counts(manifest: Manifest) -> dict[str, int]:
    return dict(sorted(manifest.images_by_class().items()))


def _queries(store: Store, manifest: Manifest | None) -> dict[str, object]:
    """What the page says about the tables of the snapshot. Those in a bucket are copied first."""
    if manifest is None:
        return {}
    key, group = f"{DATASETS}{manifest.name}", "the name of a group"
    place = str(store.path(key)) if isinstance(store, FileStore) else f"{store.uri}/{key}"
    folder = place if isinstance(store, FileStore) else manifest.name
    copy = f"aws s3 sync --exclude 'shards/*' {shlex.quote(place)} {folder}" if folder != place else ""
    queries = {"duckdb": duckdb_query(folder, group), "pandas": pandas_query(folder, group)}
    return {"folder": place, "copy": copy, "tables": manifest.tables, **queries}


_SAMPLES = """
SELECT shard, row FROM images WHERE label = $label
ORDER BY list_position(['train', 'test', 'gallery', 'query'], split), shard, row LIMIT $most
"""


def _samples(dataset: Dataset, label: str) -> tuple[bytes, ...]:
    with opened_books(dataset.store, dataset.manifest, ("images",)) as books:
        places = books.rows(_SAMPLES, label=label, most=SAMPLES)
    shards = {shard.sha256: shard for shard in dataset.manifest.shards}
    return tuple(encoded(dataset.image(shards[sha256], row).images[0], TILE_PX) for sha256, row in places)


class TryPage:
    """The Try page. The application's state contains the `Predictor` that recognizes images."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def routes(self) -> list[Route]:
        return [
            Route("/try", self._show),
            Route("/try/neighbor/{version}/{row:int}", self._neighbor),
            Route("/try", self._recognize, methods=["POST"]),
            Route("/try/review", self._send, methods=["POST"]),
        ]

    def _show(self, request: Request) -> Response:
        champion = self._backend.releases.champion()
        may_label = champion and self._backend.answers and "label" in request.state.user.may
        labels = self._backend.classes(self._backend.latest()) if may_label else []
        return page(request, "try.html.j2", champion=champion, labels=labels)

    async def _recognize(self, request: Request) -> Response:
        prediction = await _predict(request, await _image(request))
        record = await run_in_threadpool(self._backend.releases.record, prediction.version)
        return page(
            request,
            "answer.html.j2",
            prediction=prediction,
            neighbors=prediction.neighbors[:SHOWN_NEIGHBORS],
            threshold=record.manifest.threshold,
        )

    async def _send(self, request: Request) -> Response:
        user = require(request, "label")
        image = await _image(request)
        prediction = await _predict(request, image)
        add = self._backend.submissions.add
        sent = await run_in_threadpool(add, image, prediction, user.name, self._backend.now())
        return page(request, "sent.html.j2", image=sent)

    def _neighbor(self, request: Request) -> Response:
        found = self._backend.gallery.find(request.path_params["version"], request.path_params["row"])
        if found is None:
            return Response(FORGOTTEN, 404, media_type="image/svg+xml")
        return Response(found.png(), media_type="image/png")  # not cacheable: the image may be forgotten


async def _image(request: Request) -> bytes:
    """Read the request body, which is an image file. `Request.body` is not used, because it would
    keep the file in memory until the response is sent."""
    return b"".join([part async for part in request.stream()])


async def _predict(request: Request, image: bytes) -> Prediction:
    predictor: Predictor = request.app.state.predictor
    return await predictor.predict(image)


class ReleasesPage:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def routes(self) -> list[Route]:
        return [
            Route("/releases", self._show),
            Route("/releases/promote", action(self._promote), methods=["POST"]),
            Route("/releases/rollback", action(self._roll_back), methods=["POST"]),
        ]

    def _content(self, request: Request, template: str, notice: str = "") -> Response:
        champion = self._backend.releases.champion()
        releases, faults = self._backend.releases.newest()
        oldest = min((record.manifest.created for record in releases), default=self._backend.now())
        history = self._backend.releases.history(champion, oldest) if champion else []
        return page(
            request,
            template,
            champion=champion,
            target=self._backend.releases.rollback_target(champion),
            releases=releases,
            faults=faults,
            promoted={promotion.version for promotion in history},
            history=history[:PAGE_RELEASES],
            notice=notice,
        )

    def _show(self, request: Request) -> Response:
        return self._content(request, "releases.html.j2")

    def _promote(self, request: Request, form: Form) -> Response:
        version, force = field(form, "version"), field(form, "force") == "yes"
        promote = self._backend.runner.promote
        return self._after(
            request, "promote", version, lambda user: promote(version, _why(form), user.name, force=force)
        )

    def _roll_back(self, request: Request, form: Form) -> Response:
        version, roll_back = field(form, "version"), self._backend.runner.roll_back
        return self._after(request, "roll_back", version, lambda user: roll_back(version, _why(form), user.name))

    def _after(self, request: Request, what: str, version: str, move: Callable[[User], Done]) -> Response:
        done = self._backend.perform(request, "promote", what, move, version)
        return self._content(request, "releases_content.html.j2", done.sentence)


def _why(form: Form) -> str:
    """The reason for a promotion or rollback, for the promotion history."""
    why = field(form, "why")
    if not why:
        raise SettingsError("Type a reason first; the history of the releases shows it.")
    return why[:1000]
