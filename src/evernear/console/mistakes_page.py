"""The Mistakes page: the test images and labeled live queries that the live release names wrong or
calls unknown, each with its neighbors, to correct labels."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from evernear.common.text import class_name
from evernear.console.access import require
from evernear.console.backend import Backend, ReleaseAnswers
from evernear.console.class_page import LARGE_PX, TILE_PX, encoded
from evernear.console.naming import Naming, SourceImage
from evernear.console.web import Form, action, field, page, png
from evernear.data.books import file_names, opened_books
from evernear.data.preprocess import Pixels
from evernear.data.shards import Dataset
from evernear.errors import DataError
from evernear.evaluation.answer_table import NEIGHBORS
from evernear.evaluation.live_accuracy import LabeledQuery
from evernear.release.manifest import ReleaseManifest
from evernear.review.answers import Answer
from evernear.review.live_labels import correct_label
from evernear.review.live_mistakes import LiveMistakes, live_mistakes, nearest_of_logged
from evernear.review.queue import logged_picture

PAGE_MISTAKES = 24
_CACHED_PAGES = 8


class Mistake(NamedTuple):
    picture: str
    """The address of its image."""
    label: str
    answer: str
    unknown: bool
    distance: float
    neighbors: tuple[int, ...]
    digest: str = ""
    """Of a test image."""
    files: tuple[str, ...] = ()
    """Of a test image. Empty if no file of the newest snapshot has it."""
    query: str = ""
    """The ID of a live query."""


class MistakesPage:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._naming = Naming(backend)
        self._names = lru_cache(_CACHED_PAGES)(self._read_names)

    def routes(self) -> list[Route]:
        return [
            Route("/mistakes", self._show),
            Route("/mistakes", action(self._answer), methods=["POST"]),
            Route("/mistakes/live", action(self._answer_live), methods=["POST"]),
            Route("/mistakes/live/image", self._live_image),
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

    def _answer_live(self, request: Request, form: Form) -> Response:
        require(request, "label")
        live, action = self._backend.live(), field(form, "action")
        queries = live_mistakes(self._backend.store, live.version).queries if live else []
        query = next((each for each in queries if each.id == field(form, "query")), None)
        if live is None or query is None:
            raise DataError("The query is no longer among the mistakes; reload the page.")
        label = query.label if action == "keep" else class_name(field(form, "label"))
        if not label:
            raise DataError("Type the name of the class first.")
        if action != "keep" and label == query.label:
            raise DataError(f"The query already has the label {label}; choose another, or keep it.")
        correct_label(self._backend.store, query, label, self._backend.now())
        if action == "keep":
            return self._content(request, "mistakes_content.html.j2", f"The label {label} of a live query is kept.")
        is_new = label not in live.labels
        note = " The release has no class of this name, so its answer counts as wrong." if is_new else ""
        return self._content(request, "mistakes_content.html.j2", f"1 live query is now labeled {label}.{note}")

    def _content(self, request: Request, template: str, notice: str = "", failures: Sequence[str] = ()) -> Response:
        answers, latest, live = self._backend.live_answers(), self._backend.latest(), self._backend.live()
        numbers = _worst_first(answers) if answers else []
        open_numbers = [number for number in numbers if answers and answers.digest(number) not in latest]
        of_live = live_mistakes(self._backend.store, live.version) if live else LiveMistakes([], 0)
        shown = self._of_test(answers, open_numbers[:PAGE_MISTAKES]) if answers else []
        shown += self._of_live(of_live.queries[:PAGE_MISTAKES])
        shown.sort(key=lambda mistake: (mistake.unknown, mistake.distance))
        return page(
            request,
            template,
            live=live,
            answers=answers,
            mistakes=shown[:PAGE_MISTAKES],
            total=len(numbers),
            answered=len(numbers) - len(open_numbers),
            of_live=of_live,
            more=max(0, len(open_numbers) + len(of_live.queries) - PAGE_MISTAKES),
            labels=self._classes(latest, live),
            fault=self._backend.fault,
            faults=failures,
            notice=notice,
        )

    def _classes(self, latest: Mapping[str, Answer], live: ReleaseManifest | None) -> list[str]:
        if self._backend.answers:
            return self._backend.classes(latest)
        return list(live.labels) if live else []

    def _of_test(self, answers: ReleaseAnswers, numbers: Sequence[int]) -> list[Mistake]:
        names = self._files(tuple(map(answers.digest, numbers)))
        return [_of_test(answers, number, names) for number in numbers]

    def _of_live(self, queries: Sequence[LabeledQuery]) -> list[Mistake]:
        nearest = nearest_of_logged(self._backend.store, queries)
        return [_of_live(query, nearest.get(query.id, ())) for query in queries]

    def _files(self, digests: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
        """The names of each image's files in the newest snapshot."""
        manifest = self._backend.snapshot()
        return self._names(manifest.name, manifest.digest, digests) if manifest and digests else {}

    def _read_names(self, name: str, digest: str, digests: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
        manifest = self._backend.dataset(name, digest).manifest
        with opened_books(self._backend.store, manifest, ("files",)) as books:
            found = file_names(books, manifest.source, [bytes.fromhex(each) for each in digests])
        return {each.hex(): files for each, files in found.items()}

    def _live_image(self, request: Request) -> Response:
        log, query = (request.query_params.get(name, "") for name in ("log", "query"))
        return png(logged_picture(self._backend.store, log, query, _side_px(request)))

    def _image(self, request: Request) -> Response:
        answers = self._backend.answers_of(request.path_params["version"])
        if answers is None:
            raise DataError("No run recorded the answers of this release.")
        release = answers.release
        dataset = self._backend.dataset(release.dataset_name, release.dataset_digest)
        return png(encoded(_test_image(dataset, request.path_params["number"]), _side_px(request)))


def _side_px(request: Request) -> int:
    return LARGE_PX if "large" in request.query_params else TILE_PX


def _worst_first(answers: ReleaseAnswers) -> list[int]:
    """First the images named wrong, then those called unknown, the most certain answers first."""
    return [*answers.numbers("named wrong"), *answers.numbers("called unknown")]


def _of_test(answers: ReleaseAnswers, number: int, names: Mapping[str, tuple[str, ...]]) -> Mistake:
    """The test image in the row ``number`` of the table."""
    row = answers.table.row(number)
    digest = row["digest"].hex()
    return Mistake(
        picture=f"/mistakes/image/{answers.release.version}/{number}?",
        label=row["label"],
        answer=row["answer"],
        unknown=row["unknown"],
        distance=row["distance"],
        neighbors=_shown(row["neighbors"]),
        digest=digest,
        files=names.get(digest, ()),
    )


def _of_live(query: LabeledQuery, neighbors: Sequence[int]) -> Mistake:
    return Mistake(
        picture=f"/mistakes/live/image?{urlencode({'log': query.log, 'query': query.id})}&",
        label=query.label,
        answer=query.pred,
        unknown=query.unknown,
        distance=query.dist,
        neighbors=_shown(neighbors),
        query=query.id,
    )


def _shown(neighbors: Sequence[int]) -> tuple[int, ...]:
    return tuple(row for row in neighbors if row >= 0)[:NEIGHBORS]


def _test_image(dataset: Dataset, number: int) -> Pixels:
    """The pixels of an image of the test split, by its position."""
    for shard in dataset.shards("test"):
        if number < shard.count:
            return dataset.image(shard, number).images[0]
        number -= shard.count
    raise DataError("The test split has no such image.")
