"""The bot under test, wired like its process, except that a test decides when it polls."""

import json
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from slack_bolt import BoltRequest, BoltResponse

from evernear.common.store import Store, open_store
from evernear.errors import StoreError
from evernear.kubeflow.runs import KfpStep, Parameter, Run, State
from evernear.settings import Settings, SlackSettings
from evernear.settings.triggers import PermissionSettings
from evernear.triggers.requests import Request, RequestStore
from evernear.triggers.slack.app import create_slack_app
from evernear.triggers.slack.client import SlackClient
from evernear.triggers.slack.services import Access, Services
from evernear.triggers.slack.worker import Worker
from tests.loopback.slack import Click, Person, SlackServer, signed
from tests.loopback.slack.server import BOT_TOKEN, SIGNING_SECRET, PostedMessage
from tests.real.triggers.memory_runs import RunsInMemory
from tests.waiting import until

ADA, BOB, EVE = Person("U0ADA", "ada"), Person("U0BOB", "bob"), Person("U0EVE", "eve", team="T0OTHERS")
CHANNEL = "C0TRAINING"
START = datetime(2026, 11, 22, 9, 0, tzinfo=UTC)
PARAMETERS = (
    Parameter(name="store", type="STRING", default="s3://evernear"),
    Parameter(name="source", type="STRING", default="s3://images/mnist"),
    Parameter(name="preset", type="STRING", default=""),
    Parameter(name="settings", type="STRUCT", default={"train": {"augment": "none"}}),
    Parameter(name="started_by", type="STRING", default=""),
)


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


class MemoryRuns(RunsInMemory):
    """Runs that are pending until a test sets their state."""

    def __init__(self) -> None:
        super().__init__(PARAMETERS, START, State.PENDING)

    def set(self, state: State, ended: datetime | None = None, error: str = "", **steps: State) -> Run:
        """Set the state of the newest run and of its steps."""
        all_steps = tuple(KfpStep(name=name, state=step_state) for name, step_state in steps.items())
        update = {"state": state, "ended": ended, "steps": all_steps, "error": error}
        changed = self.runs[-1].model_copy(update=update)
        self.started[changed.key] = changed
        return changed


class Outage:
    """A store that is unavailable while ``is_down``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_down = False

    def __getattr__(self, name: str) -> Any:
        if self.is_down:
            raise StoreError("The store cannot be reached.")
        return getattr(self._store, name)


class Bot:
    """One process of the bot; `restart` replaces it with a new one with the same store."""

    def __init__(self, slack: SlackServer, runs: Any, workdir: Path, **permissions: tuple[str, ...]) -> None:
        self.slack = slack
        self.runs = runs
        self.clock = Clock()
        self.settings = Settings(
            workdir=workdir,
            target="registry",
            slack=SlackSettings(channel=CHANNEL, api_url=slack.api_url),
            permissions=PermissionSettings.model_validate(permissions),
        )
        self.store = Outage(open_store(self.settings.store_uri))
        self.restart()

    def restart(self, **permissions: tuple[str, ...]) -> None:
        permitted = self.settings.permissions.model_copy(update=permissions)
        self.settings = self.settings.model_copy(update={"permissions": permitted})
        slack, unretried = (SlackClient(BOT_TOKEN, self.slack.api_url, retries=retries) for retries in (True, False))
        access = Access(self.settings.permissions, unretried, self.clock)
        services = Services(self.settings, self.store, self.runs, slack, access, self.clock, wake=lambda: None)
        self.worker = Worker(services)
        self.app = create_slack_app(unretried, SIGNING_SECRET, services)
        self.requests = RequestStore(self.store)

    def deliver_during(self, late: dict[str, Any], early: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """Deliver ``early`` when ``late`` has read the request, and not yet written it."""
        find, preempted = RequestStore.find, threading.Event()

        def find_then_deliver(requests: RequestStore, request_id: str) -> Request | None:
            request = find(requests, request_id)
            if not preempted.is_set():
                preempted.set()
                self.deliver(early)
            return request

        with monkeypatch.context() as patch:
            patch.setattr(RequestStore, "find", find_then_deliver)
            self.deliver(late)

    def deliver(self, payload: dict[str, Any]) -> BoltResponse:
        """Deliver ``payload`` over HTTP, signed with the real time."""
        body, headers = signed(payload, SIGNING_SECRET)
        return self.app.dispatch(BoltRequest(body=body, headers={name: [value] for name, value in headers.items()}))

    def command(self, person: Person, text: str, channel: str = CHANNEL) -> BoltResponse:
        """``person`` types a command that changes something."""
        return self.deliver(person.types(text, channel, self.slack.response_url(channel, person.id)))

    def query(self, person: Person, text: str) -> PostedMessage:
        """The answer to a query, which follows its acknowledgement."""
        count = len(self.slack.ephemeral)
        assert self.command(person, text).body == ""
        return until(lambda: self.slack.ephemeral[count:])[0]

    def click(self, person: Person, posted: PostedMessage, button: str) -> BoltResponse:
        return self.deliver(self.slack.button(posted, button).by(person))

    def poll(self, seconds: float = 0.0) -> None:
        """Advance the clock and poll once."""
        self.clock.move(seconds)
        self.worker.poll()

    def prompt(self, text: str = "/retrain", person: Person = ADA) -> PostedMessage:
        """The prompt that follows the command ``text``."""
        assert self.command(person, text).status == 200
        self.poll()
        return self.slack.messages[-1]

    def start(self, text: str = "/retrain") -> PostedMessage:
        """The prompt of a run that has started."""
        prompt = self.prompt(text)
        self.click(ADA, prompt, "Start training")
        self.poll()
        return prompt

    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(self.store.get(entry.key)) for entry in self.store.list("triggers/audit/")]


__all__ = ["ADA", "BOB", "CHANNEL", "EVE", "Bot", "Click", "Clock", "MemoryRuns", "Outage"]
