"""The Review page: name groups of images, correct suspect labels, undo answers, start a reindex,
recognize named images again, and label random live queries."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import groupby, islice

from pydantic import TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from evernear.common.output import quantity
from evernear.common.text import class_name
from evernear.console.access import require
from evernear.console.backend import QUEUE_ITEMS, Backend
from evernear.console.named import AnswerOfOthers, answer_of_others, last_hold, named_since, remedy
from evernear.console.web import Form, Predictor, action, field, page, png
from evernear.errors import DataError, EvernearError
from evernear.evaluation.open_set import OpenSet, stated_added_recognized
from evernear.review.answers import Answer, Answers, meant_classes
from evernear.review.groups import group_items
from evernear.review.live_labels import WEEKLY, Labels, Week, import_labels
from evernear.review.queue import thumbnail
from evernear.review.suspects import Suspect, picture
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
            recent=list(islice(_at_once(latest.values()), RECENT_ANSWERS)),
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
        user = require(request, "label")
        answers = self._backend.require_answers()
        chosen = field(form, "class")  # the answer to `_question`
        kind, label = "label" if chosen else field(form, "action"), class_name(chosen or field(form, "label"))
        images = form.get("image") or []
        if not images:
            raise DataError("No image is selected.")
        if kind == "label" and not label:
            raise DataError("Type the name of the class first.")
        suspects = {suspect.image: suspect for suspect in self._backend.suspects()}
        known = self._backend.classes(answers.latest())
        if kind == "label" and not chosen and label not in known and (meant := meant_classes(label, known)):
            return _question(request, label, meant, images[0] if images[0] in suspects else "")
        now = self._backend.now()
        given = [_answer(image, kind, label, user.name, now, suspects.get(image)) for image in dict.fromkeys(images)]
        done, failures = self._record(answers, given)
        return self._content(request, "review_content.html.j2", self._notice(kind, label, done, known), failures)

    def _record(self, answers: Answers, given: Sequence[Answer]) -> tuple[int, list[str]]:
        """Record the answers that can be carried out. Return their number, and the reasons why the
        others cannot."""
        done, failures = 0, dict[str, EvernearError]()
        with self._backend.lock:
            for each in given:
                try:
                    if each.action == "undo":
                        answers.undo(each)
                    else:
                        is_query = each.action == "label" and not each.files
                        answers.label(self._backend.original(each.image) if is_query else b"", each)
                    done += 1
                except EvernearError as error:
                    failures[str(error)] = error
        if failures and not done:
            raise next(iter(failures.values()))
        return done, list(failures)

    def _notice(self, kind: str, label: str, done: int, known: Sequence[str]) -> str:
        count = quantity(done, "image")
        match kind:
            case "label":
                return f"{count} named {label}.{self._note(label, known)}"
            case "skip":
                return f"{count} skipped."
            case "keep":
                return f"{count} kept."
            case _:
                return f"{count} back in review."

    def _note(self, label: str, known: Sequence[str]) -> str:
        """Sentences about a named class that is new, or that waits for more images."""
        new = "" if label in known else f" {label} is a new class."
        count = self._backend.waiting(self._backend.latest(), self._backend.live()).get(label)
        minimum = self._backend.settings.validation.min_class_images
        return f"{new} It waits until it has {minimum:,} images: {count:,} of {minimum:,}." if count else new

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

    def _reindex(self, request: Request, _: Form) -> Response:
        runner = self._backend.runner
        self._backend.perform(request, "start", "start", lambda user: runner.reindex(user.name))
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


def _question(request: Request, label: str, meant: Sequence[str], suspect: str) -> Response:
    """Ask, below the name field of a form, whether the user means one of the classes in ``meant``.
    ``suspect`` is the image of a suspect's form."""
    response = page(request, "question.html.j2", label=label, meant=meant)
    response.headers["HX-Retarget"] = f"#question-{suspect[:16]}" if suspect else "#question"
    return response


def _answer(image: str, kind: str, label: str, who: str, at: datetime, suspect: Suspect | None) -> Answer:
    try:
        answer = Answer.model_validate(
            {
                "image": image,
                "action": kind,
                "label": label if kind == "label" else "",
                "who": who,
                "at": at,
                "files": suspect.files if suspect else (),
            }
        )
    except ValueError:
        raise DataError("The form is invalid; reload the page.") from None
    if suspect and kind == "label" and label == suspect.label:
        raise DataError(f"The image already has the label {label}; choose another, or keep it.")
    return answer


def _at_once(answers: Iterable[Answer]) -> Iterator[list[Answer]]:
    """Yield each group of answers that a user gave with one click, newest group first."""
    for _, each in groupby(
        reversed(list(answers)), lambda answer: (answer.at, answer.who, answer.action, answer.label)
    ):
        yield list(each)[::-1]


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
