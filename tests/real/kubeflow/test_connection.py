"""The connection to the KFP API: credentials, retries, timeouts and error messages."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evernear.errors import EvernearError, PipelineServerError, SettingsError
from evernear.kubeflow import connection
from evernear.kubeflow.client import KfpRuns
from evernear.kubeflow.connection import Connection
from evernear.settings import PipelineSettings, load
from tests.certificates import write_certificate
from tests.loopback.kfp import KfpServer
from tests.real.serving.fake_servers import http_server

LIST = "run_service_list_runs"


pytestmark = pytest.mark.usefixtures("short_backoff")


@pytest.fixture(autouse=True)
def _short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TIMEOUT_S", 5.0)


def connect(url: str, environment: dict[str, str] | None = None, **settings: object) -> Connection:
    values = {"endpoint": url, **settings}
    return Connection(PipelineSettings.model_validate(values), environment or {})


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_failed_reads_are_retried(kfp: KfpServer, status: int) -> None:
    kfp.fail(status=status, times=3)
    assert connect(kfp.url).call(LIST).runs is None
    assert len(kfp.calls) == 4


def test_retries_are_limited(kfp: KfpServer) -> None:
    kfp.fail(times=connection.ATTEMPTS)
    with pytest.raises(PipelineServerError, match=r"answered 503: Service unavailable\."):
        connect(kfp.url).call(LIST)
    assert len(kfp.calls) == connection.ATTEMPTS


def test_rejected_requests_are_not_retried(kfp: KfpServer) -> None:
    with pytest.raises(PipelineServerError, match=r"answered 400: Invalid sorting field: .tree.") as error:
        connect(kfp.url).call(LIST, sort_by="tree")
    assert error.value.status == 400
    assert len(kfp.calls) == 1


@pytest.mark.parametrize(
    "answer", [b"<h1>Not Found</h1>", b'{"detail": "Not Found"}', b'{"message": "Not Found", "code": 5}']
)
def test_server_that_is_not_kfp_is_named(answer: bytes) -> None:
    """Also a wrong path of the KFP API, whose gateway then names no resource."""

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        runs = KfpRuns(PipelineSettings(endpoint=f"http://127.0.0.1:{other.server_port}"))
        for call in (lambda: runs.parameters("continuous-training"), runs.list, lambda: runs.show("run")):
            with pytest.raises(PipelineServerError, match=r"is not Kubeflow Pipelines 2: .*check pipeline\.endpoint"):
                call()
        other.shutdown()


@pytest.mark.parametrize(
    ("status", "headers", "body", "sentence"),
    [
        (302, {"Location": "/login"}, b"", r"redirected again and again, probably to a login page"),
        (200, {}, b"null", r"is not Kubeflow Pipelines 2 \(it sent null\); check pipeline\.endpoint"),
        (200, {}, b"\xff", r"is not Kubeflow Pipelines 2 \(.*decode.*\); check pipeline\.endpoint"),
        (400, {}, b'{"message": null}', r"answered 400: Bad Request\.$"),
        (400, {}, b'{"message": " ", "error_message": ""}', r"answered 400: Bad Request\.$"),
    ],
)
def test_odd_answers_end_in_a_sentence(status: int, headers: dict[str, str], body: bytes, sentence: str) -> None:
    def answer(handler: Any) -> None:
        handler.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    with http_server(do_GET=answer) as port, pytest.raises(PipelineServerError, match=sentence) as error:
        connect(f"http://127.0.0.1:{port}").call(LIST)
    assert "\n" not in str(error.value)


def test_unreachable_server_error_names_url_and_remedy() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(PipelineServerError) as error:
            connect(url).call("run_service_create_run", run={})
    assert error.value.status == 503, "the request was not sent"
    assert str(error.value) == (
        f"Kubeflow Pipelines at {url} is unreachable ([Errno 111] Connection refused); "
        "check pipeline.endpoint and that the server is running."
    )


def test_create_requests_that_were_never_sent_are_retried(kfp: KfpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    connection_ = connect(kfp.url)
    service = next(s for s in connection_._services if hasattr(s, LIST))
    address, service.api_client.configuration.host = service.api_client.configuration.host, "http://127.0.0.1:9"

    def start_server(_: float) -> None:
        service.api_client.configuration.host = address

    monkeypatch.setattr("evernear.common.retry.time", SimpleNamespace(sleep=start_server))
    created = connection_.call("experiment_service_create_experiment", experiment={"display_name": "x"})
    assert created.display_name == "x"


def test_requests_time_out(kfp: KfpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(connection, "ATTEMPTS", 1)
    kfp.fail(delay_s=1.0)
    with pytest.raises(PipelineServerError, match=r"did not answer within 0\.2 s"):
        connect(kfp.url).call(LIST)


def test_bearer_token_is_read_from_the_environment() -> None:
    with KfpServer(token="let-me-in") as server:
        assert connect(server.url, {"KFP_TOKEN": "let-me-in"}).call(LIST).runs is None
        for environment in ({}, {"KFP_TOKEN": "expired"}):
            with pytest.raises(
                PipelineServerError, match="requires authentication: set KFP_TOKEN or KFP_COOKIES"
            ) as error:
                connect(server.url, environment).call(LIST)
            assert "expired" not in str(error.value)


def test_mounted_token_is_read_for_each_request(tmp_path: Path) -> None:
    mounted = tmp_path / "token"
    mounted.write_text("old")
    with KfpServer(token="new") as server:
        connection_ = connect(server.url, {"KF_PIPELINES_SA_TOKEN_PATH": str(mounted)})
        with pytest.raises(PipelineServerError, match="requires authentication"):
            connection_.call(LIST)
        mounted.write_text("new")  # the kubelet rotates it
        assert connection_.call(LIST).runs is None
        for break_, reason in ((mounted.unlink, "cannot be read: No such file"), (mounted.touch, "is empty")):
            break_()
            with pytest.raises(PipelineServerError, match=rf"^KF_PIPELINES_SA_TOKEN_PATH={mounted} {reason}"):
                connection_.call(LIST)


def test_login_page_is_an_error_and_not_an_empty_list() -> None:
    with KfpServer(cookie="authservice_session=mine") as server:
        assert connect(server.url, {"KFP_COOKIES": "a=b; authservice_session=mine"}).call(LIST).runs is None
        with pytest.raises(PipelineServerError, match="probably a login page, instead of JSON: renew KFP_COOKIES"):
            connect(server.url, {"KFP_COOKIES": "authservice_session=old"}).call(LIST)


@pytest.mark.parametrize("variable", ["KFP_TOKEN", "KFP_COOKIES", "KF_PIPELINES_SA_TOKEN_PATH"])
def test_secrets_are_not_sent_unencrypted(variable: str, tmp_path: Path) -> None:
    named, secret = variable, {variable: "not-for-everybody"}
    if variable.endswith("_PATH"):
        mounted = tmp_path / "token"
        mounted.write_text("not-for-everybody")
        named, secret = f"The token {mounted}", {variable: str(mounted)}
    with pytest.raises(SettingsError, match=f"{named} would be sent unencrypted to kfp.example.org") as error:
        connect("http://kfp.example.org", secret)
    assert "not-for-everybody" not in str(error.value)
    for allowed in (
        "https://kfp.example.org",
        "http://localhost:8080",
        "http://[::1]:8080",
        "http://ml-pipeline.kubeflow.svc:8888",
    ):
        connect(allowed, secret)


def test_endpoint_defaults_to_the_service_only_inside_a_cluster() -> None:
    assert connect("", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).url == connection.IN_CLUSTER
    assert connect("", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).ui_url == ""
    assert connect("https://kfp.example.org/pipeline/").ui_url == "https://kfp.example.org/pipeline"
    assert connect("https://api.example.org", ui_url="https://ui.example.org/").ui_url == "https://ui.example.org"
    with pytest.raises(SettingsError, match=r"set pipeline\.endpoint, for example"):
        connect("")
    for url in ("http://[kfp", "http://kfp:port", "http://localhost:8080/#/runs"):  # the last is a page of the UI
        with pytest.raises(
            SettingsError, match=r"pipeline\.endpoint = .*: it is not of the form https://host:port/path"
        ):
            load(environment={"EVERNEAR_PIPELINE__ENDPOINT": url})


def test_tls_requires_a_trusted_certificate(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    with KfpServer(certificate=certificate, key=key) as server:
        with pytest.raises(PipelineServerError, match=r"is not trusted .*pipeline\.ca_file"):
            connect(server.url).call(LIST)
        assert connect(server.url, ca_file=certificate).call(LIST).runs is None
    with pytest.raises(EvernearError, match=r"^pipeline\.ca_file=.*gone\.pem cannot be used: No such file"):
        connect("https://127.0.0.1", ca_file=tmp_path / "gone.pem")


def test_https_to_a_port_without_tls_is_no_problem_of_certificates(kfp: KfpServer) -> None:
    with pytest.raises(PipelineServerError, match=r"does not speak TLS .*use http:// in pipeline\.endpoint"):
        connect(kfp.url.replace("http:", "https:")).call(LIST)
