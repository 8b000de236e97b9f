"""Users label random live queries to measure the live accuracy."""

from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from evernear.console.access import require
from evernear.console.backend import Backend
from evernear.console.live_labels import Labels, import_labels
from evernear.console.random_queries import WEEKLY, Week
from evernear.console.web import Form, action, field, page, png
from evernear.errors import DataError

_LABELS = TypeAdapter(Labels)


class LivePart:
    """The part of the Review page for random live queries."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/review/live", self._show),
            Route("/review/live", action(self._answer), methods=["POST"]),
            Route("/review/live/image", self._image),
        ]

    def _week(self) -> tuple[Week, tuple[str, ...]] | None:
        """This week's random queries and the live release's classes, or None before the first
        release."""
        champion = self._backend.releases.champion()
        if champion is None:
            return None
        labels = self._backend.releases.record(champion.version).manifest.labels
        return self._backend.random_queries.this_week(champion.version, self._backend.now()), labels

    def _content(self, request: Request, notice: str = "") -> Response:
        found = self._week()
        if found is None:
            return Response()
        return page(request, "live.html.j2", week=found[0], classes=found[1], weekly=WEEKLY, notice=notice)

    def _show(self, request: Request) -> Response:
        return self._content(request)

    def _image(self, request: Request) -> Response:
        found = self._week()
        query = request.query_params.get("id", "")
        for each in found[0].pending if found else ():
            if each.id == query:
                return png(each.image)
        raise DataError("The query is no longer among those to label.")

    def _answer(self, request: Request, form: Form) -> Response:
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
        return self._content(request, note)


def _valid(query: str, label: str) -> Labels:
    try:
        return _LABELS.validate_python({query: label})
    except ValidationError:
        raise DataError("The form is invalid; reload the page.") from None
