"""The Mistakes page: the test images that the live release names wrong or calls unknown, each with
its neighbors, to correct labels."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from evernear.console.backend import Backend, ReleaseAnswers
from evernear.console.class_page import LARGE_PX, TILE_PX, encoded
from evernear.console.naming import Naming, SourceImage
from evernear.console.web import Form, action, page, png
from evernear.data.preprocess import Pixels
from evernear.data.shards import Dataset
from evernear.data.snapshots import opened_ledger
from evernear.errors import DataError

PAGE_MISTAKES = 24
_CACHED_PAGES = 8


class Mistake(NamedTuple):
    """A test image, with the number of its row in the table of answers."""

    number: int
    digest: str
    label: str
    answer: str
    unknown: bool
    distance: float
    neighbors: tuple[int, ...]
    files: tuple[str, ...]
    """None if no file of the newest snapshot has the image."""


class MistakesPage:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._naming = Naming(backend)
        self._names = lru_cache(_CACHED_PAGES)(self._read_names)

    def routes(self) -> list[Route]:
        return [
            Route("/mistakes", self._show),
            Route("/mistakes", action(self._answer), methods=["POST"]),
            Route("/mistakes/image/{version}/{number:int}", self._image),
        ]

    def _show(self, request: Request) -> Response:
        return self._content(request, "mistakes.html.j2")

    def _answer(self, request: Request, form: Form) -> Response:
        digests = tuple(form.get("image") or ())
        table = self._backend.live_answers()
        labels = table.labels(digests) if table else {}
        names = self._files(tuple(labels))
        known = {digest: SourceImage(names.get(digest, ()), label) for digest, label in labels.items()}
        return self._naming.answer(
            request,
            form,
            known,
            lambda notice, failures: self._content(request, "mistakes_content.html.j2", notice, failures),
        )

    def _content(self, request: Request, template: str, notice: str = "", failures: Sequence[str] = ()) -> Response:
        answers, latest = self._backend.live_answers(), self._backend.latest()
        numbers = _worst_first(answers) if answers else []
        open_numbers = [number for number in numbers if answers and answers.digest(number) not in latest]
        shown = open_numbers[:PAGE_MISTAKES]
        digests = tuple(answers.digest(number) for number in shown) if answers else ()
        names = self._files(digests)
        return page(
            request,
            template,
            live=self._backend.live(),
            answers=answers,
            mistakes=[_mistake(answers, number, names) for number in shown] if answers else [],
            total=len(numbers),
            answered=len(numbers) - len(open_numbers),
            labels=self._backend.classes(latest) if self._backend.answers else [],
            fault=self._backend.fault,
            faults=failures,
            notice=notice,
        )

    def _files(self, digests: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
        """The names of each image's files in the newest snapshot."""
        manifest = self._backend.snapshot()
        return self._names(manifest.name, manifest.digest, digests) if manifest and digests else {}

    def _read_names(self, name: str, digest: str, digests: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
        with opened_ledger(self._backend.dataset(name, digest)) as ledger:
            found = ledger.names([bytes.fromhex(each) for each in digests])
        return {each.hex(): files for each, files in found.items()}

    def _image(self, request: Request) -> Response:
        answers = self._backend.answers_of(request.path_params["version"])
        if answers is None:
            raise DataError("No run recorded the answers of this release.")
        release = answers.release
        dataset = self._backend.dataset(release.dataset_name, release.dataset_digest)
        side_px = LARGE_PX if "large" in request.query_params else TILE_PX
        return png(encoded(_test_image(dataset, request.path_params["number"]), side_px))


def _worst_first(answers: ReleaseAnswers) -> list[int]:
    """First the images named wrong, then those called unknown, the most certain answers first."""
    return [*answers.numbers("named wrong"), *answers.numbers("called unknown")]


def _mistake(answers: ReleaseAnswers, number: int, names: Mapping[str, tuple[str, ...]]) -> Mistake:
    row = answers.table.row(number)
    digest = row["digest"].hex()
    return Mistake(
        number=number,
        digest=digest,
        label=row["label"],
        answer=row["answer"],
        unknown=row["unknown"],
        distance=row["distance"],
        neighbors=tuple(each for each in row["neighbors"] if each >= 0),
        files=names.get(digest, ()),
    )


def _test_image(dataset: Dataset, number: int) -> Pixels:
    """The pixels of an image of the test split, by its position."""
    for shard in dataset.shards("test"):
        if number < shard.count:
            return dataset.image(shard, number).images[0]
        number -= shard.count
    raise DataError("The test split has no such image.")
