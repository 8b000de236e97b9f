"""The Home page: the live release, the watcher, runs in progress and the next action.
The page updates without a reload."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from evernear.errors import EvernearError, SettingsError
from evernear.triggers.console.runs import COMMANDS
from evernear.triggers.console.services import Services
from evernear.triggers.console.web import Form, action, after_warm_up, field, page, render
from evernear.triggers.watch.schedule_state import ScheduleStore

EVENTS_S = 1.0


class HomePage:
    """The Home page."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/", after_warm_up(self._show)),
            Route("/run-state", self._live),
            Route("/events", self._events),
            Route("/runs", action(self._start), methods=["POST"]),
        ]

    def _state(self) -> dict[str, Any]:
        """Template values for the run in progress or, if no run is in progress, the
        last run that ended."""
        run = self._services.runner.current(self._services.records)
        last = None
        if run is None:
            ended = next((entry for entry in self._services.records.entries() if entry.ended), None)
            last = self._services.records.outcome(ended.run) if ended else None
        return {"run": run, "last": last, "failure": self._services.runner.failure(), "now": self._services.now()}

    def _show(self, request: Request) -> Response:
        champion = self._services.releases.champion()
        record = self._services.releases.find(champion.version) if champion else None
        waiting = self._services.pending(self._services.answers.latest().keys() if self._services.answers else ())
        return page(
            request,
            "home.html.j2",
            champion=champion,
            record=record,
            watcher=ScheduleStore(self._services.store).find(),
            waiting=len(waiting),
            **self._state(),
        )

    def _live(self, request: Request) -> Response:
        return page(request, "run_state.html.j2", **self._state())

    async def _events(self, request: Request) -> Response:
        async def changes() -> AsyncIterator[str]:
            shown = ""
            while not await request.is_disconnected():
                try:
                    values = await run_in_threadpool(self._state)
                    text = render("run_state.html.j2", request=request, **values)
                    event = "run" if values["run"] else "idle"
                except EvernearError as error:
                    text, event = render("fault.html.j2", sentence=str(error)), "fault"
                if text != shown:
                    shown = text
                    data = "".join(f"data: {line}\n" for line in text.splitlines())
                    yield f"event: {event}\n{data}\n"
                else:
                    yield ": \n\n"
                await asyncio.sleep(EVENTS_S)

        return StreamingResponse(changes(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    def _start(self, request: Request, form: Form) -> Response:
        pipeline = field(form, "pipeline")
        if pipeline not in COMMANDS:
            raise SettingsError(f"{pipeline!r} is not a pipeline; reload the page.")
        runner = self._services.runner
        self._services.perform(request, "start", "start", lambda person: runner.start(pipeline, person.name))
        return self._live(request)
