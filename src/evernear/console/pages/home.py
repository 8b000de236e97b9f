"""Home: the live release, the watcher, runs in progress and the next action; moves without a reload."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from evernear.console.access import require
from evernear.console.runs import COMMANDS
from evernear.console.services import Services
from evernear.console.web import Form, action, field, page, render
from evernear.errors import EvernearError, SettingsError
from evernear.triggers.watch.schedule_state import ScheduleStore

EVENTS_S = 1.0


def routes(services: Services) -> list[Route]:
    """The routes of the page."""

    def state() -> dict[str, Any]:
        """The run in progress, or the last one that ended."""
        run = services.runner.current(services.records)
        last = None
        if run is None:
            ended = next((entry for entry in services.records.entries() if entry.ended), None)
            last = services.records.outcome(ended.run) if ended else None
        return {"run": run, "last": last, "failure": services.runner.failure(), "now": services.now()}

    def show(request: Request) -> Response:
        champion = services.registry.champion()
        record = services.registry.get(champion.version, include_pruned=True) if champion else None
        waiting = services.pending(services.answers.latest().keys() if services.answers else ())
        return page(
            request,
            "home.html.j2",
            champion=champion,
            record=record,
            watcher=ScheduleStore(services.store).find(),
            waiting=len(waiting),
            **state(),
        )

    def live(request: Request) -> Response:
        return page(request, "run_state.html.j2", **state())

    async def events(request: Request) -> Response:
        async def changes() -> AsyncIterator[str]:
            shown = ""
            while not await request.is_disconnected():
                try:
                    values = await run_in_threadpool(state)
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

    def start(request: Request, form: Form) -> Response:
        person = require(request, "start")
        pipeline = field(form, "pipeline")
        if pipeline not in COMMANDS:
            raise SettingsError(f"{pipeline!r} is not a pipeline; reload the page.")
        services.runner.start(pipeline, person.name)
        return live(request)

    return [
        Route("/", show),
        Route("/run-state", live),
        Route("/events", events),
        Route("/runs", action(start), methods=["POST"]),
    ]
