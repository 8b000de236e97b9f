"""The client over REST and gRPC, with a real TorchServe and with servers that misbehave."""

import asyncio
import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from evernear.errors import (
    DataError,
    PredictionRejectedError,
    ServerTimeoutError,
    ServerUnreachableError,
    ServingError,
    SettingsError,
)
from evernear.serving.client import GRPC_FRAME_BYTES, AsyncClient, Client, Format, Target
from evernear.serving.endpoints import read_key
from evernear.settings import Settings
from tests.certificates import server_tls, write_certificate
from tests.no_files import NO_FILES
from tests.real.serving.fake_servers import ANSWER, grpc_server, http_server
from tests.served import Served

NOTHING_LISTENS = 9  # the discard port
FORMATS: list[Format] = ["rest", "grpc"]


def plain(port: int, format: Format, **changes: object) -> Target:
    return replace(Target("127.0.0.1", port, "embedding", format), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", FORMATS)
def test_rest_and_grpc_return_the_stored_predictions(served: Served, format: Format) -> None:
    with Client.of(served.settings, format) as client:
        for image, query in served.parts.smoke_queries():
            answer = client.predict(image)
            assert (answer.pred, answer.unknown, answer.version) == (query.pred, query.unknown, served.manifest.version)
            assert answer.dist == pytest.approx(query.dist, abs=1e-3)
            assert client.predict(image, served.manifest.version).pred == query.pred


@pytest.mark.parametrize("format", FORMATS)
def test_async_client_sends_concurrent_requests(served: Served, format: Format) -> None:
    queries = served.parts.smoke_queries() * 8

    async def ask() -> list[str]:
        async with AsyncClient.of(served.settings, format) as client:
            return [answer.pred for answer in await asyncio.gather(*(client.predict(image) for image, _ in queries))]

    assert asyncio.run(ask()) == [query.pred for _, query in queries]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("body", "sentence"), [(b"", "is empty"), (b"text", "not a PNG, JPEG, WebP or HEIC")])
def test_bad_image_raises_the_servers_message(served: Served, format: Format, body: bytes, sentence: str) -> None:
    with Client.of(served.settings, format) as client, pytest.raises(PredictionRejectedError, match=sentence):
        client.predict(body)


@pytest.mark.parametrize("format", FORMATS)
def test_unknown_model_or_version_is_named_in_the_error(served: Served, format: Format) -> None:
    with (
        Client.of(served.settings, format) as client,
        pytest.raises(PredictionRejectedError, match=r"20260101\.000000\.00000000 does not exist"),
    ):
        client.predict(b"x", "20260101.000000.00000000")
    target = replace(Target.local(served.settings, format), model="nobody")
    with Client(target) as client, pytest.raises(PredictionRejectedError, match="Model not found: nobody"):
        client.predict(b"x")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("token", [None, "x"])
def test_invalid_token_is_rejected(served: Served, format: Format, token: str | None) -> None:
    target = replace(Target.local(served.settings, format), token=lambda: token)
    what = "the token" if token else "a request without a token"
    with Client(target) as client, pytest.raises(PredictionRejectedError, match=f"refuses {what}; set EVERNEAR_TOKEN"):
        client.predict(b"x")


@pytest.mark.parametrize("format", FORMATS)
def test_client_enforces_the_servers_size_limit_before_sending(served: Served, format: Format) -> None:
    image, query = served.parts.smoke_queries()[0]
    limit = served.settings.serving.max_request_size_bytes
    with Client.of(served.settings, format) as client:
        with pytest.raises(PredictionRejectedError, match=r"has \d+ bytes"):
            client.predict(image + bytes(limit))
        # Bytes after the end of a PNG are ignored.
        largest = limit - (GRPC_FRAME_BYTES if format == "grpc" else 0)
        assert client.predict(image + bytes(largest - len(image))).pred == query.pred


@pytest.mark.parametrize("format", FORMATS)
def test_unreachable_server_is_named_in_the_error(format: Format) -> None:
    with Client(plain(NOTHING_LISTENS, format)) as client:
        with pytest.raises(ServerUnreachableError, match=r"127\.0\.0\.1:9; check its host and port") as exc_info:
            client.predict(b"x")
        assert exc_info.value.exit_code == 4
        with pytest.raises(ServerUnreachableError):
            asyncio.run(ask_once(plain(NOTHING_LISTENS, format)))


async def ask_once(target: Target) -> str:
    async with AsyncClient(target) as client:
        return (await client.predict(b"x")).pred


@pytest.mark.parametrize("format", FORMATS)
def test_silent_server_raises_a_timeout(format: Format) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = plain(silent.getsockname()[1], format, timeout_s=1.5)
        with Client(target) as client, pytest.raises(ServerTimeoutError, match=r"within 1\.5 s") as exc_info:
            client.predict(b"x")
        with pytest.raises(ServerTimeoutError):
            asyncio.run(ask_once(target))
    assert exc_info.value.exit_code == 4


def test_call_that_another_task_closes_is_an_error_and_a_canceled_task_is_canceled() -> None:
    async def ask(target: Target) -> None:
        client = AsyncClient(target)
        closed, canceled = (asyncio.ensure_future(client.predict(b"x")) for _ in range(2))
        await asyncio.sleep(0.1)
        canceled.cancel()
        await asyncio.wait([canceled])
        assert canceled.cancelled()
        await client.close()
        with pytest.raises(ServerUnreachableError, match=r"was closed during the prediction"):
            await closed

    with socket.create_server(("127.0.0.1", 0)) as silent:
        asyncio.run(ask(plain(silent.getsockname()[1], "grpc", timeout_s=30)))


def test_http_statuses_map_to_errors() -> None:
    sentence = json.dumps({"code": 0, "type": "x", "message": "So it is."}).encode()
    for status, error in [
        (400, PredictionRejectedError),
        (413, PredictionRejectedError),
        (503, ServingError),
        (504, ServerTimeoutError),
    ]:
        with http_server(status=status, body=sentence) as port, Client(plain(port, "rest")) as client:
            with pytest.raises(ServingError, match="So it is") as exc_info:
                client.predict(b"x")
            assert type(exc_info.value) is error
    with (
        http_server(status=404, body=b"<html>") as port,
        Client(plain(port, "rest")) as client,
        pytest.raises(PredictionRejectedError, match="404 Not Found"),
    ):
        client.predict(b"x")


def test_grpc_statuses_map_to_errors() -> None:
    cases = [
        (grpc.StatusCode.INVALID_ARGUMENT, "So it is.", PredictionRejectedError),
        (grpc.StatusCode.INTERNAL, "So it is\norg.pytorch.serve.http.InternalServerException", ServingError),
        (grpc.StatusCode.INTERNAL, "So it is\nBadRequestException.()", PredictionRejectedError),
        (grpc.StatusCode.CANCELLED, "So it is", ServingError),
        (grpc.StatusCode.UNAVAILABLE, "No worker.\nServiceUnavailableException", ServerUnreachableError),
    ]
    for code, details, error in cases:
        with grpc_server(lambda _, context, c=code, d=details: context.abort(c, d)) as port:
            with Client(plain(port, "grpc")) as client, pytest.raises(ServingError) as exc_info:
                client.predict(b"x")
            assert type(exc_info.value) is error
            text = str(exc_info.value)
            assert f"gRPC at 127.0.0.1:{port} (No worker); " in text or text.endswith("So it is.")


@pytest.mark.parametrize("body", [b"", b"{}", b"<html>", b'{"pred": "7"}'])
def test_foreign_server_is_reported(body: bytes) -> None:
    servers = {"rest": http_server(body=body), "grpc": grpc_server(lambda *_: body)}
    for format in FORMATS:
        with (
            servers[format] as port,
            Client(plain(port, format)) as client,
            pytest.raises(ServingError, match="is not an evernear release"),
        ):
            client.predict(b"x")


def test_server_of_another_kind_is_named() -> None:
    with http_server(status=404, body=b'{"error": "Not Found"}') as port, Client(plain(port, "rest")) as client:
        with pytest.raises(PredictionRejectedError) as exc_info:
            client.predict(b"x")
        assert str(exc_info.value) == f"http://127.0.0.1:{port} answers: Not Found."
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with Client(plain(port, "grpc")) as client, pytest.raises(ServingError) as exc_info:
            client.predict(b"x")
        assert str(exc_info.value) == (
            f"The server at 127.0.0.1:{port} answers gRPC, but is another one; check its host and port."
        )
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("format", FORMATS)
def test_unusable_authorities_are_one_sentence(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere")
    with pytest.raises(SettingsError) as exc_info:
        Client(plain(NOTHING_LISTENS, format, tls=True))
    assert str(exc_info.value) == "SSL_CERT_FILE=/nowhere cannot be used: No such file or directory."


def test_grpc_retries_until_the_server_is_reachable() -> None:
    calls: list[float] = []

    def answer(_: object, context: grpc.ServicerContext) -> bytes:
        calls.append(time.monotonic())
        if len(calls) < 4:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        return json.dumps(ANSWER).encode()

    with grpc_server(answer) as port:
        with Client(plain(port, "grpc")) as client, pytest.raises(ServerUnreachableError):
            client.predict(b"x")
        assert len(calls) == 1
        assert asyncio.run(ask_once(plain(port, "grpc", attempts=4))) == "7"
        assert len(calls) == 4


def test_tls_error_says_whether_the_certificate_is_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    for tls, advice in ((server_tls(), "SSL_CERT_FILE may name its CA"), (None, "if it has no TLS, omit --tls")):
        with (
            http_server(tls) as port,
            Client(plain(port, "rest", tls=True)) as client,
            pytest.raises(ServerUnreachableError, match=f"No TLS with the server at https://.*; {advice}"),
        ):
            client.predict(b"x")


@pytest.mark.parametrize("format", FORMATS)
def test_tls_accepts_only_trusted_certificates(tmp_path: Path, format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    public, key = write_certificate(tmp_path)
    if format == "grpc":
        pair = [(key.read_bytes(), public.read_bytes())]
        server = grpc_server(lambda *_: json.dumps(ANSWER).encode(), credentials=grpc.ssl_server_credentials(pair))
    else:
        server = http_server(server_tls())
    with server as port:
        target = plain(port, format, tls=True, timeout_s=10.0)
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with Client(target) as client, pytest.raises(ServerUnreachableError):
            client.predict(b"x")
        monkeypatch.setenv("SSL_CERT_FILE", str(public))
        with Client(target) as client:
            assert client.predict(b"x").pred == "7"
        assert asyncio.run(ask_once(target)) == "7"


def test_remote_token_is_read_from_the_environment(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, query = served.parts.smoke_queries()[0]
    key = read_key(served.home, "inference")
    target = Target.remote(served.settings, "127.0.0.1", "grpc")
    with Client(target) as client:
        with pytest.raises(PredictionRejectedError, match="refuses a request without a token"):
            client.predict(image)
        monkeypatch.setenv("EVERNEAR_TOKEN", key)
        assert client.predict(image).pred == query.pred
        monkeypatch.delenv("EVERNEAR_TOKEN")
        (tmp_path / "token").write_text(f"{key}\n")
        for file in (tmp_path / "token", served.home / "key_file.json"):
            monkeypatch.setenv("EVERNEAR_TOKEN_FILE", str(file))
            assert client.predict(image).pred == query.pred
        monkeypatch.setenv("EVERNEAR_TOKEN_FILE", str(tmp_path / "absent"))
        with pytest.raises(SettingsError, match=r"EVERNEAR_TOKEN_FILE=.*absent cannot be read"):
            client.predict(image)


def test_metadata_requires_a_preprocessing_server(served: Served) -> None:
    with Client.of(served.settings) as client, pytest.raises(SettingsError, match="Only the preprocessing server"):
        client.metadata()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [*NO_FILES, pytest.param(lambda _: None, id="missing")])
def test_predict_file_requires_a_regular_file(served: Served, tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x.png")
    with Client.of(served.settings) as client, pytest.raises(DataError, match=r"x\.png cannot be read"):
        client.predict_file(tmp_path / "x.png")


def test_without_a_server_the_error_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(ServerUnreachableError, match="start it with `evernear serve`"):
        Client.of(Settings(workdir=tmp_path))
