"""The page of a class: its images, which users move, remove and look at, and its name."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from itertools import islice
from typing import NamedTuple
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from evernear.common.output import quantity
from evernear.common.text import class_name
from evernear.console.access import require
from evernear.console.backend import Backend
from evernear.console.naming import Naming, SourceImage, at_once
from evernear.console.web import Form, action, field, list_page, page, png
from evernear.data.books import opened_books, source_uri
from evernear.data.manifest import Manifest, Shard, Split
from evernear.data.preprocess import Pixels
from evernear.data.sources.names import answer_in
from evernear.errors import DataError
from evernear.evaluation.answer_table import KINDS, Kind
from evernear.review.answers import Answer
from evernear.review.queue import read_all
from evernear.review.renames import Rename, files_to_rename, rename_class
from evernear.review.suspects import picture
from evernear.serving.decoding import as_picture

PAGE_IMAGES = 60
RECENT_ANSWERS = 6
LARGE_PX = 1200
_CLASSES = 8
"""Classes whose list of images stays in memory, about 300 bytes for each image."""
TILE_PX = 96
FILTERS = ("from review", "suspect", *KINDS)


class ClassImage(NamedTuple):
    """An image of a snapshot, and where its pixels are. ``files`` is empty if no file of the source
    has it."""

    digest: str
    files: tuple[str, ...]
    split: Split
    shard: Shard
    row: int


Images = Mapping[str, ClassImage]
"""By digest."""
_OF_CLASS = """
SELECT i.digest, list(f.name ORDER BY f.name) FILTER (f.name IS NOT NULL) AS names, i.split, i.shard, i.row
FROM images i LEFT JOIN files f ON f.digest = i.digest AND f.source = $source AND NOT f.waiting
WHERE i.label = $label GROUP BY ALL ORDER BY names NULLS FIRST, i.digest
"""


class ClassPage:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._naming = Naming(backend)
        self._images = lru_cache(_CLASSES)(self._read)

    def routes(self) -> list[Route]:
        return [
            Route("/data/class", self._show),
            Route("/data/class", action(self._answer), methods=["POST"]),
            Route("/data/class/rename", action(self._rename), methods=["POST"]),
            Route("/data/class/image/{digest}", self._image),
        ]

    def _show(self, request: Request) -> Response:
        return self._content(request, "class.html.j2")

    def _answer(self, request: Request, form: Form) -> Response:
        images = self.images(_label(request))
        known = {digest: SourceImage(image.files, _label(request)) for digest, image in images.items()}
        return self._naming.answer(
            request,
            form,
            known,
            lambda notice, failures: self._content(request, "class_content.html.j2", notice, failures),
        )

    def _rename(self, request: Request, form: Form) -> Response:
        user, label = require(request, "label"), _label(request)
        target = self._backend.require_answers().target
        new = class_name(field(form, "new"))
        if not new or new == label:
            raise DataError("Type the new name of the class first.")
        live, store = self._backend.live(), self._backend.store
        known = tuple(map(class_name, live.labels)) if live else ()
        if field(form, "confirmed") != "yes":
            files = files_to_rename(store, target, label, new, known)
            return page(request, "rename_question.html.j2", label=label, new=new, files=len(files))
        with self._backend.lock:
            rename = Rename(old=label, new=new, who=user.name, at=self._backend.now())
            count = rename_class(store, target, rename, known)
        response = self._content(request, "class_content.html.j2", f"{quantity(count, 'file')} moved to {new}.")
        response.headers["HX-Retarget"] = "#review"
        return response

    def _content(self, request: Request, template: str, notice: str = "", failures: Sequence[str] = ()) -> Response:
        label, shown_only = _label(request), request.query_params.get("filter", "")
        if shown_only not in ("", *FILTERS):
            raise DataError(f"The page has no filter {shown_only}.")
        latest, answers = self._backend.latest(), self._backend.answers
        images = self.images(label)
        staying = [image for image in images.values() if not _has_left(image, label, latest)]
        chosen = list(filter(self._filter(shown_only), staying))
        number, pages = list_page(request, len(chosen), PAGE_IMAGES)
        first = PAGE_IMAGES * (number - 1)
        shown = chosen[first : first + PAGE_IMAGES]
        read_date = answers.target.modified if answers else lambda _: None
        dates = list(read_all(lambda image: read_date(image.files[0]) if image.files else None, shown))
        own = [answer for answer in latest.values() if answer.image in images]
        return page(
            request,
            template,
            label=label,
            shown=list(zip(shown, dates, strict=True)),
            total=len(staying),
            chosen=len(chosen),
            number=number,
            pages=pages,
            filters=FILTERS,
            shown_only=shown_only,
            address=lambda **changed: _address(label, **{"filter": shown_only, "page": number, **changed}),
            labels=self._backend.classes(latest) if answers else [],
            recent=list(islice(at_once(own), RECENT_ANSWERS)),
            fault=self._backend.fault,
            faults=failures,
            notice=notice,
            renamed=self._backend.renamed().get(label, ""),
            has_answers=self._backend.live_answers() is not None,
        )

    def images(self, label: str) -> Images:
        manifest = self._backend.snapshot()
        if manifest is None or label not in manifest.labels:
            raise DataError(f"No image of the class {label} was ingested.")
        return self._images(manifest.name, manifest.digest, label)

    def _read(self, name: str, digest: str, label: str) -> Images:
        """Sorted by the names of their files."""
        manifest = self._backend.dataset(name, digest).manifest
        shards = {shard.sha256: shard for shard in manifest.shards}
        with opened_books(self._backend.store, manifest, ("files", "images")) as books:
            rows = books.rows(_OF_CLASS, source=source_uri(manifest.source), label=label)
        return {
            digest.hex(): ClassImage(digest.hex(), tuple(names or ()), split, shards[shard], row)
            for digest, names, split, shard, row in rows
        }

    def _filter(self, name: str) -> Callable[[ClassImage], bool]:
        match name:
            case "":
                return lambda image: True
            case "from review":
                return lambda image: any(map(answer_in, image.files))
            case "suspect":
                suspects = {suspect.image for suspect in self._backend.suspects()}
            case _:
                answers, kinds = self._backend.live_answers(), dict[str, Kind](zip(KINDS, KINDS, strict=True))
                suspects = answers.digests(kinds[name]) if answers else set[str]()
        return lambda image: image.digest in suspects

    def _image(self, request: Request) -> Response:
        image = self.images(_label(request)).get(request.path_params["digest"])
        if image is None:
            raise DataError("The class has no such image.")
        if "large" in request.query_params:
            return png(self._original(image) or encoded(self._pixels(image), LARGE_PX))
        return png(encoded(self._pixels(image), TILE_PX))

    def _original(self, image: ClassImage) -> bytes | None:
        answers = self._backend.answers
        return picture(answers.target.read, image.files[0], LARGE_PX) if answers and image.files else None

    def _pixels(self, image: ClassImage) -> Pixels:
        manifest: Manifest | None = self._backend.snapshot()
        if manifest is None:
            raise DataError("The snapshot was deleted in the meantime; reload the page.")
        return self._backend.dataset(manifest.name, manifest.digest).image(image.shard, image.row).images[0]


def encoded(pixels: Pixels, side_px: int) -> bytes:
    """A PNG file of ``pixels`` (H, W, C), at most ``side_px`` wide and high."""
    image = as_picture(pixels)
    image.thumbnail((side_px, side_px))
    buffer = BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _label(request: Request) -> str:
    return class_name(request.query_params.get("class", ""))


def _address(label: str, **query: object) -> str:
    chosen = {name: value for name, value in query.items() if value not in ("", "1", 1)}
    return f"/data/class?{urlencode({'class': label, **chosen})}"


def _has_left(image: ClassImage, label: str, latest: Mapping[str, Answer]) -> bool:
    """Whether the last answer about the image moved it away from the class."""
    answer = latest.get(image.digest)
    return answer is not None and (
        answer.action == "remove" or (answer.action == "label" and class_name(answer.label) != label)
    )
