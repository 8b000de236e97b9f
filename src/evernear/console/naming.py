"""Answers about images, as the forms of several pages send them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from evernear.common.output import quantity
from evernear.common.text import class_name
from evernear.console.access import require
from evernear.console.backend import Backend
from evernear.console.web import Form, field, page
from evernear.errors import DataError, EvernearError
from evernear.review.answers import Answer, Answers, meant_classes


class SourceImage(NamedTuple):
    """An image of the source: the names of its files, and its label."""

    files: tuple[str, ...]
    label: str


class Naming:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def answer(
        self,
        request: Request,
        form: Form,
        known: Mapping[str, SourceImage],
        show: Callable[[str, Sequence[str]], Response],
    ) -> Response:
        """Carry out what ``form`` says about its images, and ``show`` the page with a notice and
        the failures. ``known`` are the images of the source that the page shows, by digest. The
        others are queries."""
        user = require(request, "label")
        answers = self._backend.require_answers()
        chosen = field(form, "class")  # the answer to `_question`
        kind, label = "label" if chosen else field(form, "action"), class_name(chosen or field(form, "label"))
        images = form.get("image") or []
        if not images:
            raise DataError("No image is selected.")
        if kind == "label" and not label:
            raise DataError("Type the name of the class first.")
        classes = self._backend.classes(answers.latest())
        if kind == "label" and not chosen and label not in classes and (meant := meant_classes(label, classes)):
            return _question(request, label, meant, field(form, "card"))
        now = self._backend.now()
        given = [_answer(image, kind, label, user.name, now, known.get(image)) for image in dict.fromkeys(images)]
        done, failures = self._record(answers, given)
        return show(self._notice(kind, label, done, classes), failures)

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

    def _notice(self, kind: str, label: str, done: int, classes: Sequence[str]) -> str:
        count = quantity(done, "image")
        match kind:
            case "label":
                return f"{count} named {label}.{self._note(label, classes)}"
            case "skip":
                return f"{count} skipped."
            case "keep":
                return f"{count} kept."
            case "remove":
                return f"{count} removed; the next run leaves them out."
            case _:
                return f"{count} back in review."

    def _note(self, label: str, classes: Sequence[str]) -> str:
        """Sentences about a named class that is new, or that waits for more images."""
        new = "" if label in classes else f" {label} is a new class."
        count = self._backend.waiting(self._backend.latest(), self._backend.live()).get(label)
        minimum = self._backend.settings.validation.min_class_images
        return f"{new} It waits until it has {minimum:,} images: {count:,} of {minimum:,}." if count else new


def _question(request: Request, label: str, meant: Sequence[str], card: str) -> Response:
    """Ask, below the name field of a form, whether the user means one of the classes in ``meant``.
    ``card`` identifies the form among several."""
    response = page(request, "question.html.j2", label=label, meant=meant)
    response.headers["HX-Retarget"] = f"#question-{card}" if card.isalnum() else "#question"
    return response


def _answer(image: str, kind: str, label: str, who: str, at: datetime, known: SourceImage | None) -> Answer:
    try:
        answer = Answer.model_validate(
            {
                "image": image,
                "action": kind,
                "label": label if kind == "label" else "",
                "who": who,
                "at": at,
                "files": known.files if known else (),
            }
        )
    except ValueError:
        raise DataError("The form is invalid; reload the page.") from None
    if known and kind == "label" and label == known.label:
        raise DataError(f"The image already has the label {label}; choose another, or keep it.")
    if kind in ("keep", "remove") and not answer.files:
        raise DataError("The image is no longer in the source.")
    return answer


def at_once(answers: Iterable[Answer]) -> Iterator[list[Answer]]:
    """Yield each group of answers that a user gave with one click, newest group first."""
    for _, each in groupby(
        reversed(list(answers)), lambda answer: (answer.at, answer.who, answer.action, answer.label)
    ):
        yield list(each)[::-1]
