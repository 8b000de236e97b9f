"""The Slack server: Web API, upload URLs, response URLs and Socket Mode, in a thread, with injected
faults."""

import asyncio
import itertools
import json
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WSMsgType, web

from tests.loopback.slack import block_kit
from tests.loopback.slack.people import TEAM, Click, Payload, Person, envelope

BOT_TOKEN, APP_TOKEN, SIGNING_SECRET = "xoxb-loopback", "xapp-loopback", "loopback-signing-secret"
SCOPES = "app_mentions:read,chat:write,chat:write.public,commands,files:write,usergroups:read"


@dataclass
class PostedMessage:
    """A message and all its versions."""

    channel: str
    ts: str
    thread: str | None
    versions: list[Payload] = field(default_factory=list)
    visible_to: str | None = None

    @property
    def text(self) -> str:
        last = self.versions[-1]
        return block_kit.visible(last["blocks"]) if last.get("blocks") else str(last["text"])

    @property
    def buttons(self) -> list[str]:
        return [button["text"]["text"] for button in block_kit.buttons(self.versions[-1].get("blocks") or [])]


@dataclass
class Fault:
    """An error response of a method for ``times`` calls; None: until a test removes it."""

    error: str
    status: int = 200
    retry_after_s: int | None = None
    times: int | None = 1


class SlackServer:
    """A workspace with one app. Its users see `messages`, `ephemeral` and `uploads`."""

    def __init__(self) -> None:
        self.messages: list[PostedMessage] = []
        self.ephemeral: list[PostedMessage] = []
        self.uploads: list[Payload] = []
        self.calls: list[str] = []
        self.faults: dict[str, Fault] = {}
        self.is_down = False
        self.closed_channels: set[str] = set()
        self.groups: dict[str, list[str]] = {}
        self.refused_blocks: list[str] = []
        """Block Kit violations; any that remain fail the test."""
        self.links = 0
        """WebSocket connections so far."""
        self._ts = itertools.count(1_700_000_000)
        self._files: dict[str, Payload] = {}
        self._response_urls: dict[str, tuple[str, str | None]] = {}
        self._sockets: list[web.WebSocketResponse] = []
        self._waiting: dict[str, Future[Payload]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = threading.Event()

    # --- Test interface ---------------------------------------------------------------

    def __enter__(self) -> "SlackServer":
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @property
    def api_url(self) -> str:
        return f"{self.url}/api/"

    def response_url(self, channel: str, user: str | None = None) -> str:
        """Create the response URL of one command or click."""
        name = f"r{len(self._response_urls)}"
        self._response_urls[name] = (channel, user)
        return f"{self.url}/response/{name}"

    def at(self, address: str) -> PostedMessage:
        """Return the message at ``channel/ts``."""
        return next(posted for posted in self.messages if f"{posted.channel}/{posted.ts}" == address)

    def button(self, posted: PostedMessage, text: str) -> Click:
        """Return a click on the button labeled ``text`` of a message; fail if it does not exist."""
        matches = [b for b in block_kit.buttons(posted.versions[-1]["blocks"]) if b["text"]["text"] == text]
        assert matches, f"no button {text!r} among {posted.buttons}"
        url = self.response_url(posted.channel)
        return Click(posted.channel, posted.ts, matches[0], url, posted.thread, posted.visible_to is not None)

    def mentions(self, person: Person, text: str, channel: str) -> Payload:
        """Post a mention of the bot by ``person`` in ``channel`` and return its event."""
        event = person.mentions(text, channel)
        ts = event["event"]["ts"]
        self.messages.append(PostedMessage(channel, ts, None, [{"text": text, "blocks": []}]))
        return event

    def deliver(self, payload: Payload, timeout_s: float = 5.0) -> Payload | None:
        """Send ``payload`` over Socket Mode; return the acknowledgement, or None after the
        timeout."""
        return self.deliver_envelope(envelope(payload), timeout_s)

    def deliver_envelope(self, sent: Payload, timeout_s: float = 5.0) -> Payload | None:
        future: Future[Payload] = Future()
        self._waiting[sent["envelope_id"]] = future
        self._on_loop(self._sockets[-1].send_str(json.dumps(sent)))
        try:
            return future.result(timeout_s)
        except TimeoutError:
            return None

    def ask_to_reconnect(self) -> None:
        """Send the disconnect message that Slack sends before it closes a connection."""
        message = {"type": "disconnect", "reason": "refresh_requested", "debug_info": {}}
        self._on_loop(self._sockets[-1].send_str(json.dumps(message)))

    def cut(self) -> None:
        """Close the connection without a disconnect message."""
        self._on_loop(self._sockets[-1].close())

    # --- Server -----------------------------------------------------------------------

    def _on_loop(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=2**22)
        app.add_routes(
            [
                web.route("*", "/api/{method}", self._api),
                web.post("/upload/{file}", self._upload),
                web.post("/response/{name}", self._respond),
                web.get("/link", self._link),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _api(self, request: web.Request) -> web.Response:
        method = request.match_info["method"]
        self.calls.append(method)
        if self.is_down:
            return web.Response(status=503, text="<html>down</html>", content_type="text/html")
        fault = self.faults.get(method)
        if fault and fault.times != 0:
            fault.times = None if fault.times is None else fault.times - 1
            headers = {"Retry-After": str(fault.retry_after_s)} if fault.retry_after_s is not None else {}
            return web.json_response({"ok": False, "error": fault.error}, status=fault.status, headers=headers)
        method_handler = getattr(self, "_" + method.replace(".", "_"), None)
        if method_handler is None:
            return web.json_response({"ok": False, "error": "unknown_method"})
        token = APP_TOKEN if method == "apps.connections.open" else BOT_TOKEN
        if request.headers.get("Authorization") != f"Bearer {token}":
            return web.json_response({"ok": False, "error": "invalid_auth"})
        result: Payload = method_handler(await _arguments(request))
        return web.json_response({"ok": "error" not in result} | result, headers={"x-oauth-scopes": SCOPES})

    def _auth_test(self, _: Payload) -> Payload:
        return {
            "url": "https://evernear.slack.com/",
            "team": "evernear",
            "user": "evernear",
            "team_id": TEAM,
            "user_id": "U0BOT",
            "bot_id": "B0BOT",
        }

    def _apps_connections_open(self, _: Payload) -> Payload:
        return {"url": self.url.replace("http", "ws") + "/link"}

    def _chat_postMessage(self, arguments: Payload) -> Payload:  # noqa: N802 - Slack's name
        if fault := self._message_fault(arguments):
            return fault
        channel = arguments["channel"]
        if channel.startswith("U"):
            channel = f"D{channel[1:]}"
        thread = arguments.get("thread_ts")
        if thread and not any(posted.ts == thread and posted.channel == channel for posted in self.messages):
            return {"error": "thread_not_found"}
        posted = PostedMessage(channel, f"{next(self._ts)}.000100", thread, [arguments])
        self.messages.append(posted)
        return {"channel": channel, "ts": posted.ts, "message": arguments}

    def _chat_update(self, arguments: Payload) -> Payload:
        matches = [s for s in self.messages if (s.channel, s.ts) == (arguments["channel"], arguments["ts"])]
        if not matches:
            return {"error": "message_not_found"}
        if fault := self._message_fault(arguments):
            return fault
        matches[0].versions.append(arguments)
        return {"channel": matches[0].channel, "ts": matches[0].ts, "text": arguments["text"]}

    def _chat_postEphemeral(self, arguments: Payload) -> Payload:  # noqa: N802
        if fault := self._message_fault(arguments):
            return fault
        ts = f"{next(self._ts)}.000100"
        self.ephemeral.append(PostedMessage(arguments["channel"], ts, None, [arguments], arguments["user"]))
        return {"message_ts": ts}

    def _usergroups_users_list(self, arguments: Payload) -> Payload:
        members = self.groups.get(arguments["usergroup"])
        return {"error": "no_such_subteam"} if members is None else {"users": members}

    def _files_getUploadURLExternal(self, arguments: Payload) -> Payload:  # noqa: N802
        if int(arguments["length"]) < 1 or not arguments["filename"]:
            return {"error": "invalid_arguments"}
        file = f"F{len(self._files)}"
        self._files[file] = dict(arguments)
        return {"upload_url": f"{self.url}/upload/{file}", "file_id": file}

    def _files_completeUploadExternal(self, arguments: Payload) -> Payload:  # noqa: N802
        files = json.loads(arguments["files"]) if isinstance(arguments["files"], str) else arguments["files"]
        for file in files:
            upload = self._files[file["id"]]
            if len(upload.get("data", b"")) != int(upload["length"]):
                return {"error": "file_not_uploaded"}
            where = {"channel": arguments.get("channel_id"), "thread": arguments.get("thread_ts")}
            self.uploads.append(upload | {"title": file.get("title")} | where)
        return {"files": files}

    def _message_fault(self, arguments: Payload) -> Payload | None:
        if arguments.get("channel") in self.closed_channels:
            return {"error": "not_in_channel"}
        if not arguments.get("text") and not arguments.get("blocks"):
            return {"error": "no_text"}
        blocks = arguments.get("blocks") or []
        arguments["blocks"] = json.loads(blocks) if isinstance(blocks, str) else blocks
        if faults := block_kit.faults(arguments["blocks"]):
            self.refused_blocks += faults
            return {"error": "invalid_blocks", "response_metadata": {"messages": faults}}
        return None

    async def _upload(self, request: web.Request) -> web.Response:
        self._files[request.match_info["file"]]["data"] = await request.read()
        return web.Response(text="OK")

    async def _respond(self, request: web.Request) -> web.Response:
        channel, user = self._response_urls[request.match_info["name"]]
        arguments: Payload = await request.json()
        if self._message_fault({**arguments, "channel": "-"}):
            return web.Response(status=500, text="invalid_blocks")
        posted = PostedMessage(channel, f"{next(self._ts)}.000100", None, [arguments], user or "U?")
        (self.ephemeral if arguments.get("response_type") == "ephemeral" else self.messages).append(posted)
        return web.Response(text="ok")

    async def _link(self, request: web.Request) -> web.WebSocketResponse:
        link = web.WebSocketResponse()
        await link.prepare(request)
        self._sockets.append(link)
        self.links += 1
        await link.send_str(json.dumps({"type": "hello", "num_connections": 1, "debug_info": {}}))
        async for message in link:
            if message.type == WSMsgType.TEXT:
                acknowledgement = json.loads(message.data)
                waiting = self._waiting.pop(acknowledgement["envelope_id"], None)
                if waiting:
                    waiting.set_result(acknowledgement)
        return link


async def _arguments(request: web.Request) -> Payload:
    if request.content_type == "application/json" and await request.read():
        return {key: value for key, value in (await request.json()).items() if value is not None}
    return dict(request.query) | dict((await request.post()).items())
