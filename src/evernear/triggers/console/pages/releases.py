"""The Releases page: promote a release or roll back, with a reason."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from evernear.errors import SettingsError
from evernear.triggers.console.access import Person
from evernear.triggers.console.releases import PAGE_RELEASES
from evernear.triggers.console.runs import Done
from evernear.triggers.console.services import Services
from evernear.triggers.console.web import Form, action, after_warm_up, field, page


class ReleasesPage:
    """The Releases page."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/releases", after_warm_up(self._show)),
            Route("/releases/promote", action(self._promote), methods=["POST"]),
            Route("/releases/rollback", action(self._roll_back), methods=["POST"]),
        ]

    def _content(self, request: Request, template: str, notice: str = "") -> Response:
        champion = self._services.releases.champion()
        releases, faults = self._services.releases.newest()
        history = self._services.releases.history(champion) if champion else []
        return page(
            request,
            template,
            champion=champion,
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

        def move(person: Person) -> Done:
            return self._services.runner.promote(version, _why(form), person.name, force=force)

        return self._after(request, "promote", version, move)

    def _roll_back(self, request: Request, form: Form) -> Response:
        version = field(form, "version")

        def move(person: Person) -> Done:
            return self._services.runner.roll_back(version, _why(form), person.name)

        return self._after(request, "roll_back", version, move)

    def _after(self, request: Request, what: str, version: str, move: Callable[[Person], Done]) -> Response:
        done = self._services.perform(request, "promote", what, move, version)
        return self._content(request, "releases_content.html.j2", done.sentence)


def _why(form: Form) -> str:
    """The reason for a promotion or rollback, for the promotion history.

    Raises:
        SettingsError: the reason is missing.
    """
    why = field(form, "why")
    if not why:
        raise SettingsError("Type a reason first; the history of the releases shows it.")
    return why[:1000]
