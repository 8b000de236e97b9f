"""Who asks, how long and how often, and what is said when it goes wrong."""

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evernear.errors import EvernearError, PipelineServerError, SettingsError
from evernear.kubeflow import connection
from evernear.kubeflow.connection import Connection, Refused
from evernear.settings import PipelineSettings
from tests.loopback.kfp import KfpServer

LIST = "run_service_list_runs"


@pytest.fixture(autouse=True)
def _impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BACKOFF_S", 0.01)


@pytest.fixture(scope="module")
def server() -> Iterator[KfpServer]:
    with KfpServer() as server:
        yield server


def connect(url: str, environment: dict[str, str] | None = None, **settings: object) -> Connection:
    given = {"endpoint": url, "timeout_s": 5.0, **settings}
    return Connection(PipelineSettings.model_validate(given), environment or {})


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_question_is_asked_again(server: KfpServer, status: int) -> None:
    server.calls.clear()
    server.fail(status=status, times=3)
    assert connect(server.url).ask(LIST).runs is None
    assert len(server.calls) == 4


def test_patience_has_an_end(server: KfpServer) -> None:
    server.calls.clear()
    server.fail(times=2)
    with pytest.raises(PipelineServerError, match=r"answered 503: Service unavailable\."):
        connect(server.url, attempts=2).ask(LIST)
    assert len(server.calls) == 2


def test_a_no_is_not_asked_again(server: KfpServer) -> None:
    server.calls.clear()
    with pytest.raises(Refused, match=r"answered 400: Invalid sorting field: .tree.") as refused:
        connect(server.url).ask(LIST, sort_by="tree")
    assert refused.value.status == 400
    assert len(server.calls) == 1


def test_nobody_there_is_one_sentence() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(PipelineServerError) as said:
            connect(url).ask("run_service_create_run", run={})
    assert str(said.value) == (
        f"Kubeflow Pipelines at {url} cannot be reached ([Errno 111] Connection refused); "
        "check pipeline.endpoint and that the server is up."
    )


def test_what_was_never_sent_is_sent_again_even_if_it_creates_something(
    server: KfpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected = connect(server.url)
    service = next(s for s in connected._services if hasattr(s, LIST))
    address, service.api_client.configuration.host = service.api_client.configuration.host, "http://127.0.0.1:9"

    def come_up(_: float) -> None:
        service.api_client.configuration.host = address

    monkeypatch.setattr(time, "sleep", come_up)
    made = connected.ask("experiment_service_create_experiment", experiment={"display_name": "x"})
    assert made.display_name == "x"


def test_a_silent_server_is_not_waited_for_longer_than_set(server: KfpServer) -> None:
    server.fail(delay_s=1.0)
    began = time.monotonic()
    with pytest.raises(PipelineServerError, match=r"did not answer within 0\.2 s"):
        connect(server.url, timeout_s=0.2, attempts=1).ask(LIST)
    assert time.monotonic() - began < 0.9


def test_a_bearer_token_comes_from_the_environment() -> None:
    with KfpServer(token="let-me-in") as server:
        assert connect(server.url, {"KFP_TOKEN": "let-me-in"}).ask(LIST).runs is None
        for environment in ({}, {"KFP_TOKEN": "expired"}):
            with pytest.raises(Refused, match="does not know who asks: set KFP_TOKEN or KFP_COOKIES") as said:
                connect(server.url, environment).ask(LIST)
            assert "expired" not in str(said.value).removesuffix("to one that has not expired.")


def test_a_pods_token_is_read_again_for_each_request(tmp_path: Path) -> None:
    mounted = tmp_path / "token"
    mounted.write_text("old")
    with KfpServer(token="new") as server:
        connected = connect(server.url, {"KF_PIPELINES_SA_TOKEN_PATH": str(mounted)})
        with pytest.raises(Refused, match="does not know who asks"):
            connected.ask(LIST)
        mounted.write_text("new")  # the kubelet rotates it
        assert connected.ask(LIST).runs is None
        mounted.unlink()
        with pytest.raises(PipelineServerError, match=r"The token for http.* cannot be read"):
            connected.ask(LIST)


def test_a_session_that_has_expired_is_not_taken_for_an_empty_list() -> None:
    with KfpServer(cookie="authservice_session=mine") as server:
        assert connect(server.url, {"KFP_COOKIES": "a=b; authservice_session=mine"}).ask(LIST).runs is None
        with pytest.raises(Refused, match="a log-in most likely, instead of JSON: renew KFP_COOKIES"):
            connect(server.url, {"KFP_COOKIES": "authservice_session=old"}).ask(LIST)


@pytest.mark.parametrize("variable", ["KFP_TOKEN", "KFP_COOKIES"])
def test_a_secret_does_not_travel_in_the_clear(variable: str) -> None:
    secret = {variable: "not-for-everybody"}
    with pytest.raises(SettingsError, match=f"{variable} would travel unencrypted to kfp.example.org") as said:
        connect("http://kfp.example.org", secret)
    assert "not-for-everybody" not in str(said.value)
    for fine in (
        "https://kfp.example.org",
        "http://localhost:8080",
        "http://[::1]:8080",
        "http://ml-pipeline.kubeflow.svc:8888",
    ):
        connect(fine, secret)


def test_a_pods_token_does_not_travel_in_the_clear(tmp_path: Path) -> None:
    mounted = tmp_path / "token"
    mounted.write_text("not-for-everybody")
    secret = {"KF_PIPELINES_SA_TOKEN_PATH": str(mounted)}
    with pytest.raises(SettingsError, match=f"The token {mounted} would travel unencrypted to kfp.example.org"):
        connect("http://kfp.example.org", secret)
    connect("https://kfp.example.org", secret)
    connect("http://ml-pipeline.kubeflow.svc:8888", secret)


def test_the_server_of_the_cluster_is_found_from_inside_only() -> None:
    assert connect("", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).url == connection.IN_CLUSTER
    assert connect("", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).ui_url == ""
    assert connect("https://kfp.example.org/pipeline/").ui_url == "https://kfp.example.org/pipeline"
    assert connect("https://api.example.org", ui_url="https://ui.example.org/").ui_url == "https://ui.example.org"
    with pytest.raises(SettingsError, match=r"set pipeline\.endpoint, for example"):
        connect("")


def test_tls_is_spoken_with_servers_of_a_trusted_authority_only(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *words.split(), *names], check=True, capture_output=True)
    with KfpServer(certificate=certificate, key=key) as server:
        with pytest.raises(PipelineServerError, match=r"is not trusted .*pipeline\.ca_file"):
            connect(server.url, attempts=1).ask(LIST)
        assert connect(server.url, ca_file=certificate).ask(LIST).runs is None
    with pytest.raises(EvernearError, match=r"The CA file .*gone\.pem .*cannot be read"):
        connect("https://127.0.0.1", ca_file=tmp_path / "gone.pem")


def test_the_constructor_asks_the_server_nothing(server: KfpServer) -> None:
    """kfp.Client would ask whether it is multi-user, and wait 25 s for a server that is down."""
    server.calls.clear()
    connect(server.url)
    assert not server.calls
