"""The bot under test, wired like its process, except that a test decides when it polls."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from slack_bolt import BoltRequest, BoltResponse

from evernear.common.store import Store, open_store
from evernear.errors import PipelineServerError, StoreError
from evernear.kubeflow.runs import KfpStep, Parameter, Run, State
from evernear.settings import Settings, SlackSettings
from evernear.settings.triggers import PermissionSettings
from evernear.triggers.requests import RequestStore
from evernear.triggers.slack.app import create_slack_app
from evernear.triggers.slack.client import SlackClient
from evernear.triggers.slack.services import Access, Services
from evernear.triggers.slack.worker import Worker
from tests.loopback.slack import Click, Person, SlackServer, signed
from tests.loopback.slack.server import BOT_TOKEN, SIGNING_SECRET, PostedMessage
from tests.waiting import until

ADA, BOB, EVE = Person("U0ADA", "ada"), Person("U0BOB", "bob"), Person("U0EVE", "eve", team="T0OTHERS")
CHANNEL = "C0TRAINING"
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
        self.now = datetime(2026, 11, 22, 9, 0, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


class MemoryRuns:
    """An in-memory pipeline server with the interface of `evernear.kubeflow.client.KfpRuns`."""

    def __init__(self) -> None:
        self.started: dict[str, Run] = {}
        """By key."""
        self.stopped: list[str] = []
        self.is_down = False

    def parameters(self, pipeline: str) -> Sequence[Parameter]:
        self._answer()
        return PARAMETERS

    def start(self, pipeline: str, parameters: Mapping[str, Any], key: str, store: Store | None = None) -> Run:
        self._answer()
        if key not in self.started:
            number = len(self.started) + 1
            self.started[key] = Run(
                id=f"{number:08d}-0000-4000-8000-000000000000",
                name=f"{pipeline} {number}",
                pipeline=pipeline,
                pipeline_version="c0ffee1",
                state=State.PENDING,
                created=datetime(2026, 11, 22, 9, 0, tzinfo=UTC),
                parameters=dict(parameters),
                key=key,
                url=f"https://kubeflow.example/#/runs/details/{number}",
            )
        return self.started[key]

    def show(self, run_id: str) -> Run:
        self._answer()
        return next(run for run in self.started.values() if run.id == run_id)

    def list(self, pipeline: str | None = None, limit: int = 10, since: datetime | None = None) -> Sequence[Run]:
        self._answer()
        return [run for run in reversed(self.started.values()) if pipeline in (None, run.pipeline)][:limit]

    def stop(self, run_id: str) -> None:
        self._answer()
        self.stopped.append(run_id)

    def set(self, state: State, ended: datetime | None = None, error: str = "", **steps: State) -> Run:
        """Set the state of the newest run and of its steps."""
        key = next(reversed(self.started))
        all_steps = tuple(KfpStep(name=name, state=step_state) for name, step_state in steps.items())
        update = {"state": state, "ended": ended, "steps": all_steps, "error": error}
        changed = self.started[key].model_copy(update=update)
        self.started[key] = changed
        return changed

    def _answer(self) -> None:
        if self.is_down:
            raise PipelineServerError("Kubeflow Pipelines at http://kfp.example cannot be reached.")


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
