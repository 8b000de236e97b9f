"""The Review page: name groups of images, correct suspect labels, undo answers, start a
reindex, and recognize named images again."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import groupby, islice

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from evernear.common.output import quantity
from evernear.errors import DataError, EvernearError
from evernear.review.answers import Answer
from evernear.review.groups import group_items
from evernear.review.suspects import Suspect, picture
from evernear.review.thumbnails import thumbnail
from evernear.triggers.console.access import require
from evernear.triggers.console.named import last_hold, named_since, remedy
from evernear.triggers.console.predictor import Predictor
from evernear.triggers.console.services import QUEUE_ITEMS, Services
from evernear.triggers.console.web import Form, action, after_warm_up, field, page, png

RECENT_ANSWERS = 12
"""Maximum number of recent answers shown below the groups of images. One answer may
cover several images."""
SHOWN_SUSPECTS = 24
ASKED_AGAIN = 100
"""Maximum number of recently named images that are recognized again after a reindex."""


class ReviewPage:
    """The Review page. The application's state contains the `Predictor` that recognizes
    named images again."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/review", after_warm_up(self._show)),
            Route("/review", action(self._answer), methods=["POST"]),
            Route("/review/named", self._named),
            Route("/review/again", self._again),
            Route("/review/image/{image}", self._image),
            Route("/review/suspect/{image}", self._suspect_image),
        ]

    def _content(self, request: Request, template: str, notice: str = "", failures: Sequence[str] = ()) -> Response:
        latest = self._services.answers.latest() if self._services.answers else {}
        target = self._services.target
        suspects = (
            suspect
            for suspect in self._services.suspects()
            if suspect.image not in latest and target and picture(target.read, suspect.files[0])
        )
        pending = self._services.pending(latest.keys())
        suggested = dict.fromkeys(label for item in pending for label in item.candidates[:1])
        return page(
            request,
            template,
            groups=group_items(pending, self._services.releases.find).groups,
            limit=QUEUE_ITEMS if len(pending) == QUEUE_ITEMS else 0,
            labels=list(dict.fromkeys([*suggested, *target.labels])) if target else [],
            suspects=list(islice(suspects, SHOWN_SUSPECTS)),
            recent=list(islice(_at_once(latest.values()), RECENT_ANSWERS)),
            **self._named_values(latest),
            fault=self._services.fault,
            faults=[*failures, *(self._services.answers.set_aside.values() if self._services.answers else ())],
            notice=notice,
        )

    def _named_values(self, latest: Mapping[str, Answer]) -> dict[str, object]:
        """Template values for the classes whose newly labeled images are not in a
        release yet."""
        champion = self._services.releases.champion()
        record = self._services.releases.find(champion.version) if champion else None
        answers = [each for each in latest.values() if champion is None or each.at > champion.promotion.since]
        hold = last_hold(self._services.store, self._services.records) if answers else None
        return {"named": named_since(answers, record.manifest.labels if record else (), hold), "remedy": remedy}

    def _named(self, request: Request) -> Response:
        latest = self._services.answers.latest() if self._services.answers else {}
        return page(request, "named.html.j2", **self._named_values(latest))

    def _show(self, request: Request) -> Response:
        return self._content(request, "review.html.j2")

    def _answer(self, request: Request, form: Form) -> Response:
        person = require(request, "label")
        answers, _ = self._services.require_answers()
        kind, label = field(form, "action"), field(form, "label")
        images = form.get("image") or []
        if not images:
            raise DataError("No image is selected.")
        if kind == "label" and not label:
            raise DataError("Type the name of the class first.")
        suspects = {suspect.image: suspect for suspect in self._services.suspects()}
        now, done = self._services.now(), 0
        failures: dict[str, EvernearError] = {}
        with self._services.lock:
            for image in dict.fromkeys(images):
                each = _answer(image, kind, label, person.name, now, suspects.get(image))
                try:
                    if kind == "undo":
                        answers.undo(each)
                    else:
                        answers.label(b"" if each.files or kind != "label" else self._services.original(image), each)
                    done += 1
                except EvernearError as error:
                    failures[str(error)] = error
        if failures and not done:
            raise next(iter(failures.values()))
        count = quantity(done, "image")
        did = {"label": f"{count} named {label}.", "skip": f"{count} skipped.", "keep": f"{count} kept."}
        return self._content(
            request, "review_content.html.j2", did.get(kind, f"{count} back in review."), list(failures)
        )

    def _image(self, request: Request) -> Response:
        item = self._services.find(request.path_params["image"])
        if item is None:
            raise DataError("The image is no longer in the queue.")
        return png(thumbnail(item.image))

    def _suspect_image(self, request: Request) -> Response:
        _, target = self._services.require_answers()
        suspect = next((each for each in self._services.suspects() if each.image == request.path_params["image"]), None)
        name = suspect and (suspect.duplicate if "duplicate" in request.query_params else suspect.files[0])
        found = picture(target.read, name) if name else None
        if found is None:
            raise DataError("The image is no longer in the source.")
        return png(found)

    async def _again(self, request: Request) -> Response:
        predictor: Predictor = request.app.state.predictor
        named = await run_in_threadpool(_named, self._services)
        recognized: list[tuple[Answer, bool]] = []
        for each, original in named[:ASKED_AGAIN]:
            try:
                prediction = await predictor.predict(original)
            except DataError:
                continue
            recognized.append((each, not prediction.unknown and prediction.pred == each.label))
        return page(request, "again.html.j2", asked=recognized)


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
    """Yield each group of answers that a user gave with one click, newest group
    first."""
    for _, each in groupby(
        reversed(list(answers)), lambda answer: (answer.at, answer.who, answer.action, answer.label)
    ):
        yield list(each)[::-1]


def _named(services: Services) -> Sequence[tuple[Answer, bytes]]:
    """Up to `ASKED_AGAIN` named images whose files still exist, most recently named
    first."""
    named: list[tuple[Answer, bytes]] = []
    latest = services.answers.latest() if services.answers else {}
    for answer in reversed(latest.values()):
        if answer.action == "label" and not answer.files:
            with suppress(EvernearError):
                named.append((answer, services.original(answer.image)))
        if len(named) == ASKED_AGAIN:
            break
    return named
