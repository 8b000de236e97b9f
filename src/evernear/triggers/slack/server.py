"""The bot's process: a connection to Slack (or a port that Slack calls), a worker thread and a
heartbeat."""

import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.client import HTTPException
from typing import TYPE_CHECKING, TypeVar

import uvicorn
from slack_bolt import App
from slack_bolt.adapter.socket_mode import SocketModeHandler
from slack_bolt.adapter.starlette.handler import to_bolt_request, to_starlette_response
from slack_sdk.signature import SignatureVerifier
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from evernear.common.environment import secret
from evernear.common.retry import doubling
from evernear.common.store.current import current_store
from evernear.errors import SettingsError, SlackError
from evernear.serving.endpoints import listening_socket
from evernear.serving.http.limits import limited_server
from evernear.settings import Settings, SlackSettings
from evernear.triggers.slack import heartbeat
from evernear.triggers.slack.app import create_slack_app
from evernear.triggers.slack.client import SlackClient
from evernear.triggers.slack.services import Access, Clock, Services
from evernear.triggers.slack.worker import Worker

if TYPE_CHECKING:
    from evernear.kubeflow.client import KfpRuns

PING_S = 5
"""Interval between pings, and between the SDK's connection checks."""
EVENTS_PATH = "/slack/events"
POLL_S = 5.0
"""Time between two polls of runs and proposals, which cost a request each."""
POLL_MAX_S = 900.0
"""Maximum duration of a poll, which may load a release into the local server. A poll that takes
longer counts as stuck."""
DISCONNECTED_MAX_S = 600.0
"""Time without a connection after which the heartbeat stops, so that the orchestrator restarts the
process."""
MAX_REQUEST_SIZE_BYTES = 2**20  # Slack sends tens of kilobytes; larger requests get 413
UPLOAD_TIMEOUT_S = 10.0
REFUSAL_INTERVAL_S = 60.0
SHUTDOWN_S = 25
"""Time to finish at shutdown. The timeout is less than the 30 s that Kubernetes gives a pod to shut
down."""
_UNKNOWN_FORM = (AttributeError, KeyError, RecursionError, TypeError, ValueError)
"""Raised by Bolt if the JSON of a request has a structure that it does not expect."""
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def _secret(name: str, prefix: str = "") -> str:
    """The variable ``name``, or the file that ``name_FILE`` names. It is removed from the
    environment, so that child processes do not inherit it."""
    value = secret(name)
    os.environ.pop(name, None)
    if not value:
        raise SettingsError(f"{name} is missing; set it, or {name}_FILE to a file that contains it (docs/slack.md).")
    if not value.startswith(prefix):
        raise SettingsError(f"{name} is not the right token: it must begin with {prefix}.")
    return value


def read_secrets(settings: SlackSettings) -> tuple[str, str]:
    """The bot token, and the app token of Socket Mode or the signing secret of HTTP."""
    bot_token = _secret("SLACK_BOT_TOKEN", "xoxb-")
    return bot_token, _secret("SLACK_APP_TOKEN", "xapp-") if settings.mode == "socket" else _secret(
        "SLACK_SIGNING_SECRET"
    )


def serve_slack(
    settings: Settings, runs: "KfpRuns", stop: threading.Event, clock: Clock = lambda: datetime.now(UTC)
) -> None:
    """Run the bot until ``stop`` is set. The next process continues acknowledged requests that are
    still open."""
    is_socket = settings.slack.mode == "socket"
    bot_token, secret = read_secrets(settings.slack)
    slack = SlackClient(bot_token, settings.slack.api_url, retries=True)
    unretried = SlackClient(bot_token, settings.slack.api_url, retries=False)
    woken = threading.Event()
    store, access = current_store(settings.store_uri), Access(settings.permissions, unretried, clock)
    services = Services(settings, store, runs, slack, access, clock, woken.set)
    app = _connect(lambda: create_slack_app(unretried, "" if is_socket else secret, services), stop)
    if app is None:
        return
    connection = _socket_mode(app, secret, slack, stop) if is_socket else _http_mode(app, secret, settings.slack)
    with connection as is_connected, _polling(Worker(services), woken) as polled_s:
        _log.info("The bot is up, in mode %s.", settings.slack.mode)
        _beat(settings, is_connected, polled_s, stop)
    _log.info("The bot has stopped.")


def _beat(
    settings: Settings, is_connected: Callable[[], bool], polled_s: Callable[[], float], stop: threading.Event
) -> None:
    """Write heartbeats until ``stop`` is set, while the worker polls and Slack is connected or was
    connected recently."""
    connected_s = time.monotonic()
    while True:
        now_s = time.monotonic()
        connected_s = now_s if is_connected() else connected_s
        if now_s - connected_s < DISCONNECTED_MAX_S and now_s - polled_s() < POLL_MAX_S:
            heartbeat.write(settings)
        if stop.wait(heartbeat.INTERVAL_S):
            return


@contextmanager
def _polling(worker: Worker, woken: threading.Event) -> Generator[Callable[[], float]]:
    """Poll in a thread every `POLL_S` seconds, and immediately when ``woken`` is set. Yields a
    function that returns the time of the last poll."""
    stopping, polled_s = threading.Event(), time.monotonic()

    def run() -> None:
        nonlocal polled_s
        while not stopping.is_set():
            woken.clear()
            worker.poll()
            polled_s = time.monotonic()
            woken.wait(POLL_S)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield lambda: polled_s
    finally:
        stopping.set()
        woken.set()
        thread.join(SHUTDOWN_S)  # a slower thread is abandoned, and the next process continues its request


def _connect(connect: Callable[[], _T], stop: threading.Event) -> _T | None:
    """Retry ``connect`` while Slack is unavailable. None if ``stop`` is set before it succeeds."""
    for wait_s in doubling(1.0, 60.0):
        if stop.is_set():
            break
        try:
            return connect()
        except (OSError, HTTPException, SlackError) as error:
            if isinstance(error, SlackError) and error.reason != "unavailable":
                raise
            _log.warning("%s Retrying in %.0f s.", error, wait_s)
        stop.wait(wait_s)
    return None


@contextmanager
def _socket_mode(app: App, app_token: str, slack: SlackClient, stop: threading.Event) -> Generator[Callable[[], bool]]:
    """Yields a function that returns whether the connection is up. The SDK renews the
    connection."""
    handler = SocketModeHandler(app, app_token, web_client=slack, ping_interval=PING_S)
    try:
        _connect(handler.connect, stop)
        yield handler.client.is_connected
    finally:
        handler.close()


@contextmanager
def _http_mode(app: App, signing_secret: str, settings: SlackSettings) -> Generator[Callable[[], bool]]:
    """Listen for requests from Slack, behind a proxy that terminates TLS. Yields a function that
    returns whether the server is up."""
    server = create_server(app, signing_secret)
    with listening_socket(settings.host, settings.port, "slack.port") as listener:
        _log.info("Listening for Slack at http://%s:%d%s.", *listener.getsockname()[:2], EVENTS_PATH)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield thread.is_alive
        finally:
            server.should_exit = True
            thread.join(SHUTDOWN_S)


def _is_signed(verifier: SignatureVerifier, body: bytes, timestamp: str, signature: str) -> bool:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return False
    return signature.isascii() and verifier.is_valid(text, timestamp, signature)


class _Refusals:
    """Logs refused requests, at most once in `REFUSAL_INTERVAL_S`, because anyone may send them."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def log(self, sent_s: int) -> None:
        """``sent_s`` is the time of the request by its sender's clock, in seconds since 1970."""
        now = datetime.now(UTC)
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + REFUSAL_INTERVAL_S
        try:
            sent = f"{datetime.fromtimestamp(sent_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
        except (OverflowError, ValueError, OSError):
            sent = f"{sent_s} s after 1970"
        _log.warning(
            "Refused a request: it was signed with another secret than "
            "SLACK_SIGNING_SECRET, or the clocks differ by more than five minutes. "
            "The request is of %s; it is %s here.",
            sent,
            f"{now:%Y-%m-%d %H:%M:%S} UTC",
        )


def create_server(app: App, signing_secret: str) -> uvicorn.Server:
    """Serve ``app`` over HTTP. Only requests that are signed and at most five minutes old reach
    Bolt, which parses a request before it checks the signature."""

    refusals, verifier = _Refusals(), SignatureVerifier(signing_secret)

    async def events(request: HttpRequest) -> Response:
        body = await request.body()
        if request.query_params.get("ssl_check") == "1" or b"ssl_check=1" in body.split(b"&"):
            # Slack checks the certificate, without a signature.
            return PlainTextResponse("ok")
        if request.method == "GET":
            return PlainTextResponse("Slack posts events.", status_code=405)
        timestamp = request.headers.get("x-slack-request-timestamp", "")
        if not timestamp.isdecimal() or len(timestamp) > 20:
            return PlainTextResponse("Not signed.", status_code=401)
        if not _is_signed(verifier, body, timestamp, request.headers.get("x-slack-signature", "")):
            refusals.log(int(timestamp))
            return PlainTextResponse("Not signed.", status_code=401)
        try:
            answer = await run_in_threadpool(lambda: app.dispatch(to_bolt_request(request, body)))
        except _UNKNOWN_FORM as error:
            _log.warning("Slack sent a request of an unknown form (%s), which was ignored.", type(error).__name__)
            return PlainTextResponse("Unknown form.", status_code=400)
        return to_starlette_response(answer)

    async def health(_: HttpRequest) -> Response:
        return PlainTextResponse("ok")

    return limited_server(
        Starlette(routes=[Route(EVENTS_PATH, events, methods=["GET", "POST"]), Route("/health", health)]),
        max_size_bytes=MAX_REQUEST_SIZE_BYTES,
        upload_timeout_s=UPLOAD_TIMEOUT_S,
        shutdown_timeout_s=SHUTDOWN_S,
    )
