"""The Releases page: promote a release or roll back, with a reason."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from evernear.console.access import User
from evernear.console.backend import Backend
from evernear.console.releases import PAGE_RELEASES
from evernear.console.runs import Done
from evernear.console.web import Form, action, after_warm_up, field, page
from evernear.errors import SettingsError


class ReleasesPage:
    """The Releases page."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/releases", after_warm_up(self._show)),
            Route("/releases/promote", action(self._promote), methods=["POST"]),
            Route("/releases/rollback", action(self._roll_back), methods=["POST"]),
        ]

    def _content(self, request: Request, template: str, notice: str = "") -> Response:
        champion = self._backend.releases.champion()
        releases, faults = self._backend.releases.newest()
        history = self._backend.releases.history(champion) if champion else []
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

        def move(user: User) -> Done:
            return self._backend.runner.promote(version, _why(form), user.name, force=force)

        return self._after(request, "promote", version, move)

    def _roll_back(self, request: Request, form: Form) -> Response:
        version = field(form, "version")

        def move(user: User) -> Done:
            return self._backend.runner.roll_back(version, _why(form), user.name)

        return self._after(request, "roll_back", version, move)

    def _after(self, request: Request, what: str, version: str, move: Callable[[User], Done]) -> Response:
        done = self._backend.perform(request, "promote", what, move, version)
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
