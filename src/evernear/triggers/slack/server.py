"""The bot as a process: one connection to Slack (or a port that Slack calls), two threads that work, one heartbeat."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import uvicorn
from slack_bolt import App
from slack_bolt.adapter.socket_mode import SocketModeHandler
from slack_bolt.adapter.starlette.handler import to_bolt_request, to_starlette_response
from slack_bolt.error import BoltError
from slack_sdk.errors import SlackApiError
from slack_sdk.web import WebClient
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from evernear.errors import PortInUseError, SettingsError
from evernear.settings import Settings, SlackSettings
from evernear.store import open_store
from evernear.triggers.slack import health
from evernear.triggers.slack.access import Access
from evernear.triggers.slack.answers import Answers
from evernear.triggers.slack.app import Desk, create_app
from evernear.triggers.slack.web import RateLimited, Unreached, Web, failure_of
from evernear.triggers.slack.worker import Clock, Worker

if TYPE_CHECKING:
    from evernear.kubeflow.client import KfpRuns

PING_S = 5
"""Between two pings; as often the SDK looks whether the connection stands, and makes a new one."""
EVENTS_PATH = "/slack/events"
TIMEOUT_S = 10
LOOK_MAX_S = 300.0
"""A look that takes longer hangs; one that moves the champion may take a rollout more."""
DISCONNECTED_MAX_S = 600.0
"""Without a connection for so long, a new process is worth a try."""
STOP_WITHIN_S = 25.0
"""Less than the 30 s that Kubernetes gives a pod to end."""
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Secrets:
    """The app's tokens; never printed."""

    bot_token: str = field(repr=False)
    app_token: str = field(repr=False)
    signing_secret: str = field(repr=False)

    @staticmethod
    def of_environment(settings: SlackSettings) -> "Secrets":
        """``SLACK_BOT_TOKEN``, and ``SLACK_APP_TOKEN`` or ``SLACK_SIGNING_SECRET``, or the files named by ``..._FILE``.

        They leave the environment of this process, so that nothing that it starts inherits them.

        Raises:
            SettingsError: one that the mode needs is missing, or is no such token.
        """
        in_socket_mode = settings.mode == "socket"
        return Secrets(
            bot_token=_secret("SLACK_BOT_TOKEN", "xoxb-"),
            app_token=_secret("SLACK_APP_TOKEN", "xapp-") if in_socket_mode else "",
            signing_secret="" if in_socket_mode else _secret("SLACK_SIGNING_SECRET", ""),
        )


def _secret(name: str, prefix: str) -> str:
    value = os.environ.pop(name, "")
    file = os.environ.get(f"{name}_FILE", "")
    if not value and file:
        try:
            value = Path(file).read_text()
        except OSError as error:
            raise SettingsError(f"{name}_FILE={file} cannot be read: {error.strerror}.") from None
    value = value.strip()
    if not value:
        raise SettingsError(f"{name} is missing; set it, or {name}_FILE to a file that holds it (docs/slack.md).")
    if not value.startswith(prefix):
        raise SettingsError(f"{name} is not the right token: it has to begin with {prefix}.")
    return value


def serve(settings: Settings, runs: "KfpRuns", stop: threading.Event, clock: Clock = lambda: datetime.now(UTC)) -> None:
    """Be the bot until ``stop`` is set; what was acknowledged by then is done now or by the next process.

    Raises:
        SettingsError: a token is missing.
        SlackError: Slack refuses a token.
        PortInUseError: ``slack.port`` is in use, in mode http.
    """
    slack, secrets = settings.slack, Secrets.of_environment(settings.slack)
    store = open_store(settings.store_uri)
    client = WebClient(token=secrets.bot_token, base_url=slack.api_url, timeout=TIMEOUT_S)
    web = Web(client)
    access = Access(slack, web, clock)
    worker = Worker(settings, store, runs, web, access, clock)
    loops = [
        _Loop("follow", worker.follow, slack.poll_s, LOOK_MAX_S),
        _Loop("move", worker.move, slack.poll_s, LOOK_MAX_S + settings.kubernetes.rollout_timeout_s),
    ]

    def wake() -> None:
        for loop in loops:
            loop.wake()

    desk = Desk(slack, store, access, Answers(store, runs, clock), clock, wake)

    def sign_in() -> App:
        web.sign_in()
        return create_app(client, secrets.signing_secret, desk)  # a BoltError now is Slack's, not the token's

    app = _until_reached(sign_in, stop)
    if app is None:
        return
    connection = _socket_mode(app, secrets.app_token, stop) if slack.mode == "socket" else _http_mode(app, slack)
    with connection as is_up, _running(loops):
        _log.info("The bot is up, in mode %s.", slack.mode)
        _stay(settings, is_up, loops, stop)
    _log.info("The bot has ended.")


def _stay(settings: Settings, is_up: Callable[[], bool], loops: "list[_Loop]", stop: threading.Event) -> None:
    """Until ``stop`` is set, with a heartbeat while the threads work and Slack is, or was lately, connected."""
    connected_s = time.monotonic()
    while True:
        now_s = time.monotonic()
        connected_s = now_s if is_up() else connected_s
        if now_s - connected_s < DISCONNECTED_MAX_S and all(loop.is_well() for loop in loops):
            health.beat(settings)
        if stop.wait(health.BEAT_S):
            return


class _Loop:
    """A thread that looks every ``poll_s``, and at once when it is woken."""

    def __init__(self, name: str, look: Callable[[], None], poll_s: float, look_max_s: float) -> None:
        self._look = look
        self._poll_s = poll_s
        self._look_max_s = look_max_s
        self._woken = threading.Event()
        self._ended = False
        self._looked_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def end(self) -> None:
        self._ended = True
        self._woken.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def is_well(self) -> bool:
        return self._thread.is_alive() and time.monotonic() - self._looked_s < self._look_max_s

    def _run(self) -> None:
        while not self._ended:
            self._woken.clear()
            self._look()
            self._looked_s = time.monotonic()
            self._woken.wait(self._poll_s)


@contextmanager
def _running(loops: list[_Loop]) -> Generator[None]:
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.end()
        until_s = time.monotonic() + STOP_WITHIN_S
        for loop in loops:  # one that takes longer is left behind: its request is open and the next process has it
            loop.join(max(0.0, until_s - time.monotonic()))


def _until_reached(connect: Callable[[], _T], stop: threading.Event) -> _T | None:
    """The outcome of ``connect``, tried until Slack can be reached; None if ``stop`` comes first.

    Raises:
        SlackError: Slack refuses.
    """
    wait_s = 1.0
    while not stop.is_set():
        try:
            return connect()
        except (BoltError, OSError, HTTPException, Unreached) as error:
            _log.warning("%s Trying again in %.0f s.", error, wait_s)
        except SlackApiError as error:
            refused = failure_of("apps.connections.open", error)
            if not isinstance(refused, Unreached | RateLimited):
                raise refused from None
            _log.warning("%s Trying again in %.0f s.", refused, wait_s)
        stop.wait(wait_s)
        wait_s = min(60.0, 2 * wait_s)
    return None


@contextmanager
def _socket_mode(app: App, app_token: str, stop: threading.Event) -> Generator[Callable[[], bool]]:
    """A connection to Slack, which the SDK renews by itself; yields whether it stands."""
    handler = SocketModeHandler(app, app_token, ping_interval=PING_S)

    try:
        _until_reached(handler.connect, stop)
        yield handler.client.is_connected
    finally:
        handler.close()


@contextmanager
def _http_mode(app: App, settings: SlackSettings) -> Generator[Callable[[], bool]]:
    """A port that Slack calls, through a proxy that speaks TLS; yields whether it takes calls."""
    config = uvicorn.Config(
        http_app(app, settings.max_request_size_bytes), log_level="warning", access_log=False, server_header=False
    )
    server = uvicorn.Server(config)
    with _bound(settings.host, settings.port) as listening:
        _log.info("Slack is taken at http://%s:%d%s.", *listening.getsockname()[:2], EVENTS_PATH)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield thread.is_alive
        finally:
            server.should_exit = True
            thread.join(STOP_WITHIN_S)


def http_app(app: App, max_request_size_bytes: int) -> Starlette:
    """``app`` behind HTTP; Bolt checks each request's signature, and that it is at most five minutes old."""

    async def events(request: Request) -> Response:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_request_size_bytes:
                return PlainTextResponse("Too large.", status_code=413)
        stamp = request.headers.get("x-slack-request-timestamp", "")
        if not stamp.isdecimal() or len(stamp) > 20:  # Bolt takes it for a number
            return PlainTextResponse("Not signed.", status_code=401)
        try:
            bolt_request = to_bolt_request(request, bytes(body))
        except ValueError:
            return PlainTextResponse("No text.", status_code=400)
        return to_starlette_response(await run_in_threadpool(app.dispatch, bolt_request))

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok")

    return Starlette(routes=[Route(EVENTS_PATH, events, methods=["POST"]), Route("/health", health)])


def _bound(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise PortInUseError(
            f"slack.port: {host}:{port} cannot be bound: {error.strerror}; choose another one."
        ) from None
