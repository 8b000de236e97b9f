"""Relative locations in the environment mean the directory where the command was typed, whatever a
step's is. TorchServe's workers share the cores."""

import json
import os
import sys
from pathlib import Path

import pytest

from evernear.common import processes
from evernear.common.environment import secret, through_proxy, usable, with_absolute_locations
from evernear.common.masking import mask
from evernear.errors import EvernearError, SettingsError
from evernear.kubeflow import local_run
from evernear.serving import configuration
from evernear.settings import load

BASE = Path("/here/and there")


@pytest.mark.parametrize(
    ("name", "value", "absolute"),
    [
        ("AWS_CA_BUNDLE", "c.pem", "/here/and there/c.pem"),
        ("AWS_SHARED_CREDENTIALS_FILE", "./keys", "/here/and there/keys"),
        ("SSL_CERT_FILE", "../c.pem", "/here/and there/../c.pem"),
        ("EVERNEAR_TOKEN_FILE", "token", "/here/and there/token"),
        ("KF_PIPELINES_SA_TOKEN_PATH", "token", "/here/and there/token"),
        ("HF_HOME", "hub", "/here/and there/hub"),
        ("HF_HUB_CACHE", "hub", "/here/and there/hub"),
        ("PROMETHEUS_MULTIPROC_DIR", "metrics", "/here/and there/metrics"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "c.pem", "/here/and there/c.pem"),
        ("KUBECONFIG", "a.yaml:/etc/b.yaml:", "/here/and there/a.yaml:/etc/b.yaml:"),
        ("PATH", "bin:/usr/bin", "/here/and there/bin:/usr/bin"),
        ("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db", "sqlite:////here/and there/mlflow.db"),
        ("MLFLOW_TRACKING_URI", "sqlite+pysqlite:///a/b.db?x=1", "sqlite+pysqlite:////here/and there/a/b.db?x=1"),
        ("MLFLOW_TRACKING_URI", "file:./mlruns", "file:/here/and%20there/mlruns"),
        ("MLFLOW_REGISTRY_URI", "mlruns", "/here/and there/mlruns"),
        ("EVERNEAR_MILVUS_URI", "./milvus.db", "/here/and there/milvus.db"),
    ],
)
def test_relative_locations_become_absolute(name: str, value: str, absolute: str) -> None:
    assert with_absolute_locations({name: value}, BASE) == {name: absolute}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_CA_BUNDLE", "/etc/c.pem"),
        ("AWS_CA_BUNDLE", ""),
        ("KUBECONFIG", "~/.kube/config"),
        ("MLFLOW_TRACKING_URI", "sqlite:////var/mlflow.db"),
        ("MLFLOW_TRACKING_URI", "sqlite:///:memory:"),
        ("MLFLOW_TRACKING_URI", "file:///var/mlruns"),
        ("MLFLOW_TRACKING_URI", "http://mlflow:5000"),
        ("MLFLOW_TRACKING_URI", "postgresql://mlflow@db/mlflow"),
        ("MLFLOW_TRACKING_URI", "databricks"),
        ("EVERNEAR_MILVUS_URI", "http://milvus:19530"),
        ("AWS_ENDPOINT_URL", "http://minio:9000"),
        ("EVERNEAR_DATA__SOURCE", "folder:images"),
        ("KFP_TOKEN", "token"),
    ],
)
def test_other_values_stay(name: str, value: str) -> None:
    assert with_absolute_locations({name: value}, BASE) == {name: value}


def test_steps_get_absolute_locations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the pipeline runs in an empty directory, which is deleted after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    monkeypatch.setenv("AWS_CA_BUNDLE", "c.pem")
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([os.getcwd(), dict(os.environ)]))\nsys.exit(1)\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    settings = load(environment={}, overrides=["workdir=work"])
    with pytest.raises(EvernearError):
        # More than a pipe holds, so that the process always ends before it has all.
        local_run.run_pipeline(settings, lambda _: None, once={"left_over": "x" * 100_000})
    (log,) = (tmp_path / "work" / "runs").glob("*/log.txt")
    directory, environment = json.loads(log.read_text().splitlines()[0])
    assert Path(directory) != tmp_path
    assert environment["MLFLOW_TRACKING_URI"] == f"sqlite:///{tmp_path}/mlflow.db"
    assert environment["AWS_CA_BUNDLE"] == str(tmp_path / "c.pem")


def test_torchserve_gets_absolute_locations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works in the server's directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERNEAR_MILVUS_URI", "milvus.db")
    environment = configuration.java_environment(load(environment={}).serving, tmp_path / "home")
    assert environment["EVERNEAR_MILVUS_URI"] == str(tmp_path / "milvus.db")


def test_workers_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "available_cpus", lambda: 7)
    settings = load(environment={}, overrides=["serving.workers=2"]).serving
    for name in (processes.THREADS, processes.CHOSEN_THREADS):
        monkeypatch.setenv(name, "7")
    assert configuration.java_environment(settings, tmp_path)[processes.THREADS] == "3"
    assert os.environ[processes.THREADS] == "7"
    monkeypatch.setenv(processes.THREADS, "5")
    assert configuration.java_environment(settings, tmp_path)[processes.THREADS] == "5", "a user's number"


def test_relative_paths_in_settings_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load(
        environment={"EVERNEAR_DATA__SOURCE": "folder:images"},
        overrides=["index.uri=milvus.db", "train.weights=weights.pt", "workdir=work"],
    )
    assert settings.index.uri == str(tmp_path / "milvus.db")
    assert settings.train.weights == str(tmp_path / "weights.pt")
    assert settings.data.source == f"folder:{tmp_path}/images"
    assert settings.store_uri == (tmp_path / "work" / "store").as_uri()
    assert type(settings).model_validate(settings.model_dump(mode="json")) == settings
    assert load(environment={}, overrides=["index.uri=http://milvus:19530"]).index.uri == "http://milvus:19530"


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("https_proxy", "http://me:pass@proxy.example:3128", " through the proxy proxy.example:3128 (HTTPS_PROXY)"),
        ("HTTPS_PROXY", "http://[::1]:3128", " through the proxy [::1]:3128 (HTTPS_PROXY)"),
        ("http_proxy", "http://proxy.example:3128", ""),
        ("no_proxy", "*", ""),
    ],
)
def test_proxy_is_named_without_its_login(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, sentence: str
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    assert through_proxy("https://hub.example/weights") == sentence
    monkeypatch.setenv("NO_PROXY", "hub.example")
    assert through_proxy("https://hub.example/weights") == ""


def test_secret_in_a_file_is_read_like_one_in_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    monkeypatch.setenv("SOME_TOKEN", "")
    monkeypatch.setenv("SOME_TOKEN_FILE", str(file))
    for content, reason in {
        b"": "is empty",
        b"\n": "is empty",
        b"\xff": "cannot be read: it is not text",
        b"first-half\nsecond-half": "contains a line break",
    }.items():
        file.write_bytes(content)
        with pytest.raises(SettingsError, match=f"^SOME_TOKEN_FILE={file} {reason}") as raised:
            secret("SOME_TOKEN")
        assert "second-half" not in str(raised.value)
    file.write_text("in-the-file\n")
    assert secret("SOME_TOKEN") == "in-the-file"
    assert mask("in-the-file") == "***"
    monkeypatch.setenv("SOME_TOKEN", "in-the-variable")
    assert secret("SOME_TOKEN") == "in-the-variable"


def test_unusable_secret_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"^KFP_TOKEN contains a line break, .*; set it again\.$"):
        usable("KFP_TOKEN", {"KFP_TOKEN": "first-half\nsecond-half"})
