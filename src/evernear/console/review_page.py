"""The Review page: name groups of images, correct suspect labels, undo answers, start a reindex,
recognize named images again, and label random live queries."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice

from pydantic import TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from evernear.common.text import class_name
from evernear.console.access import require
from evernear.console.backend import QUEUE_ITEMS, Backend
from evernear.console.named import AnswerOfOthers, answer_of_others, last_hold, named_since, remedy
from evernear.console.naming import Naming, SourceImage, at_once
from evernear.console.runs import Kind
from evernear.console.starts import nothing_to_reindex
from evernear.console.web import Form, Predictor, action, field, page, png
from evernear.errors import DataError, EvernearError
from evernear.evaluation.open_set import OpenSet, stated_added_recognized
from evernear.review.answers import Answer
from evernear.review.groups import group_items
from evernear.review.live_labels import WEEKLY, Labels, Week, import_labels
from evernear.review.queue import thumbnail
from evernear.review.suspects import picture
from evernear.serving.responses import Prediction

RECENT_ANSWERS = 12
"""Maximum number of recent answers shown below the groups of images. One answer may cover several
images."""
SHOWN_SUSPECTS = 24
_LABELS = TypeAdapter(Labels)
ASKED_AGAIN = 100
"""Maximum number of recently named images that are recognized again after a reindex."""


class ReviewPage:
    """The Review page. The application's state contains the `Predictor` that recognizes named
    images again."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._naming = Naming(backend)

    def routes(self) -> list[Route]:
        return [
            Route("/review", self._show),
            Route("/review", action(self._answer), methods=["POST"]),
            Route("/review/named", self._named),
            Route("/review/again", self._again),
            Route("/review/image/{image}", self._image),
            Route("/review/suspect/{image}", self._suspect_image),
            Route("/review/reindex", self._show_state),
            Route("/review/reindex", action(self._reindex), methods=["POST"]),
            Route("/review/train", action(self._train), methods=["POST"]),
            Route("/review/starts", self._starts),
            Route("/review/live", self._show_week),
            Route("/review/live", action(self._label_query), methods=["POST"]),
            Route("/review/live/image", self._query_image),
        ]

    def _content(self, request: Request, template: str, notice: str = "", failures: Sequence[str] = ()) -> Response:
        latest = self._backend.latest()
        answers = self._backend.answers
        suspects = (
            suspect
            for suspect in self._backend.suspects()
            if suspect.image not in latest and answers and picture(answers.target.read, suspect.files[0])
        )
        pending = self._backend.pending(latest.keys())
        suggested = dict.fromkeys(label for item in pending for label in item.candidates[:1])
        return page(
            request,
            template,
            groups=group_items(pending, self._backend.releases.find),
            limit=QUEUE_ITEMS if len(pending) == QUEUE_ITEMS else 0,
            labels=list(dict.fromkeys([*suggested, *self._backend.classes(latest)])) if answers else [],
            suspects=list(islice(suspects, SHOWN_SUSPECTS)),
            recent=list(islice(at_once(latest.values()), RECENT_ANSWERS)),
            **self._named_values(latest),
            fault=self._backend.fault,
            faults=[*failures, *(answers.set_aside.values() if answers else ())],
            notice=notice,
        )

    def _named_values(self, latest: Mapping[str, Answer]) -> dict[str, object]:
        """Template values for the classes with labeled images that the live release does not
        contain."""
        live, answers = self._backend.live(), list(latest.values())
        if live and self._backend.answers:
            answers = self._backend.released.missing(answers, self._backend.answers.target.layout, live)
        hold = last_hold(self._backend.store) if answers else None
        return {
            "named": named_since(answers, live.labels if live else (), hold),
            "waiting": self._backend.waiting(latest, live),
            "minimum": self._backend.settings.validation.min_class_images,
            "remedy": remedy,
        }

    def _named(self, request: Request) -> Response:
        return page(request, "named.html.j2", **self._named_values(self._backend.latest()))

    def _show(self, request: Request) -> Response:
        return self._content(request, "review.html.j2")

    def _answer(self, request: Request, form: Form) -> Response:
        suspects = {each.image: SourceImage(each.files, each.label) for each in self._backend.suspects()}
        return self._naming.answer(
            request,
            form,
            suspects,
            lambda notice, failures: _answered(self._content(request, "review_content.html.j2", notice, failures)),
        )

    def _image(self, request: Request) -> Response:
        item = self._backend.find(request.path_params["image"])
        if item is None:
            raise DataError("The image is no longer in the queue.")
        return png(thumbnail(item.image))

    def _suspect_image(self, request: Request) -> Response:
        read = self._backend.require_answers().target.read
        suspect = next((each for each in self._backend.suspects() if each.image == request.path_params["image"]), None)
        name = suspect and (suspect.duplicate if "duplicate" in request.query_params else suspect.files[0])
        found = picture(read, name) if name else None
        if found is None:
            raise DataError("The image is no longer in the source.")
        return png(found)

    async def _again(self, request: Request) -> Response:
        predictor: Predictor = request.app.state.predictor
        named, waiting = await run_in_threadpool(_named, self._backend)
        recognized: list[tuple[Answer, bool]] = []
        expected = ""
        for each, original in named:
            try:
                prediction = await predictor.predict(original)
                answer = await run_in_threadpool(self._answer_of_others, prediction, original)
            except DataError:
                continue
            if answer:
                expected = self._expected_of_added(prediction.version)
                recognized.append((each, not answer.unknown and answer.label == class_name(each.label)))
        return page(
            request,
            "again.html.j2",
            asked=recognized,
            unasked=len(named) - len(recognized),
            expected=expected,
            waiting=waiting,
            minimum=self._backend.settings.validation.min_class_images,
        )

    def _expected_of_added(self, version: str) -> str:
        """What the release measured for images of a class that was added without training."""
        metrics = self._backend.releases.record(version).manifest.metrics
        return OpenSet(held_out=(), added_recognized=stated_added_recognized(metrics)).describe_added()

    def _answer_of_others(self, prediction: Prediction, image: bytes) -> AnswerOfOthers | None:
        release = self._backend.releases.record(prediction.version).manifest
        return answer_of_others(prediction, image, self._backend.gallery, release)

    def _starts(self, request: Request) -> Response:
        """The buttons that start a run, and why one of them would change nothing."""
        return page(request, "starts.html.j2", nothing=nothing_to_reindex(self._backend))

    def _reindex(self, request: Request, _: Form) -> Response:
        return self._start(request, "reindex")

    def _train(self, request: Request, _: Form) -> Response:
        return self._start(request, "train")

    def _start(self, request: Request, kind: Kind) -> Response:
        runner = self._backend.runner
        self._backend.perform(request, "start", "start", lambda user: runner.start(kind, user.name))
        return page(request, "reindex.html.j2", state=runner.state())

    def _show_state(self, request: Request) -> Response:
        """The line below the button. A browser that saw the run in progress also receives the event
        on which other parts of the page load again."""
        state = self._backend.runner.state()
        response = page(request, "reindex.html.j2", state=state)
        if "watching" in request.query_params and not state.is_running:
            response.headers["HX-Trigger"] = "run-ended"
        return response

    def _week(self) -> tuple[Week, tuple[str, ...]] | None:
        """This week's random queries and the live release's classes, or None before the first
        release."""
        live = self._backend.live()
        return (
            (self._backend.random_queries.this_week(live.version, self._backend.now()), live.labels) if live else None
        )

    def _show_week(self, request: Request, notice: str = "") -> Response:
        found = self._week()
        if found is None:
            return Response()
        return page(request, "live.html.j2", week=found[0], classes=found[1], weekly=WEEKLY, notice=notice)

    def _query_image(self, request: Request) -> Response:
        found = self._week()
        query = request.query_params.get("id", "")
        for each in found[0].pending if found else ():
            if each.id == query:
                return png(each.image)
        raise DataError("The query is no longer among those to label.")

    def _label_query(self, request: Request, form: Form) -> Response:
        require(request, "label")
        query, label = field(form, "query"), field(form, "label")
        if not label:
            raise DataError("Type the name of the class first.")
        result = import_labels(self._backend.store, _valid(query, label), self._backend.now())
        if result.missing:
            raise DataError("The query is no longer in the log.")
        note = f"Labeled {label}."
        if result.unknown_classes:
            note += " The release has no class of this name, so its answer counts as wrong."
        return self._show_week(request, note)


def _answered(response: Response) -> Response:
    """``response``, with the event on which the buttons that start a run load again."""
    response.headers["HX-Trigger"] = "answered"
    return response


def _named(backend: Backend) -> tuple[Sequence[tuple[Answer, bytes]], dict[str, int]]:
    """Up to `ASKED_AGAIN` named images whose files still exist, most recently named first, and the
    classes that wait, whose images are left out."""
    named: list[tuple[Answer, bytes]] = []
    latest = backend.latest()
    waiting = backend.waiting(latest, backend.live())
    for answer in reversed(latest.values()):
        if answer.action == "label" and not answer.files and class_name(answer.label) not in waiting:
            with suppress(EvernearError):
                named.append((answer, backend.original(answer.image)))
        if len(named) == ASKED_AGAIN:
            break
    return named, waiting


def _valid(query: str, label: str) -> Labels:
    try:
        return _LABELS.validate_python({query: label})
    except ValidationError:
        raise DataError("The form is invalid; reload the page.") from None
