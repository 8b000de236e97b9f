"""No secret of the environment, and none that has the form of one, is printed or recorded."""

import base64
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import quote

import pytest

from evernear.common import masking
from evernear.common.masking import MASK, configure_masking, copy_masked, mask, remember
from evernear.common.output import printable
from evernear.common.run_record import RunRecord
from evernear.common.store import open_store
from tests.real.scenarios.workspace import Workspace

SECRET = 'p/w+"<Zq7 &x%é'


@pytest.fixture(autouse=True)
def no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test remembers its own secrets."""
    monkeypatch.setattr(masking, "_remembered", set())
    monkeypatch.setattr(masking, "_forms", ())


def test_values_made_with_echo_are_stripped() -> None:
    environment = {
        "AWS_SESSION_TOKEN": "session-token\n",
        "KFP_COOKIES": "\ta=12345678\r\n",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9000\n",
        "EVERNEAR_STORE": "s3://bucket\n",
        "DATABASE_URL": "postgres://a:b@c\n",
        "HF_TOKEN": "\n",
        "AWS_REGION": " us-east-1\n",
    }
    configure_masking(environment)
    assert environment == {
        "AWS_SESSION_TOKEN": "session-token",
        "KFP_COOKIES": "a=12345678",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9000",
        "EVERNEAR_STORE": "s3://bucket",
        "DATABASE_URL": "postgres://a:b@c",
        "AWS_REGION": "us-east-1",
    }


@pytest.mark.parametrize(
    "form",
    [
        SECRET,
        quote(SECRET, safe=""),
        json.dumps(SECRET)[1:-1],
    ],
)
def test_secret_is_masked_in_every_form(form: str) -> None:
    remember(SECRET)
    assert mask(f"before {form} after") == f"before {MASK} after"
    assert mask(mask(form)) == MASK


def test_document_is_read_again_although_a_field_is_called_like_the_password(tmp_path: Path) -> None:
    remember("expected")
    record = RunRecord(open_store(tmp_path.as_uri()), "run")
    record.save(probe={"expected_false_accepts": [1, "not as expected"]})
    assert record.load("probe") == {"expected_false_accepts": [1, f"not as {MASK}"]}


@pytest.mark.parametrize("before", ["", "a:", "me:", "user:"])
def test_secret_is_masked_in_a_basic_authorization(before: str) -> None:
    remember(SECRET)
    encoded = base64.b64encode(f"{before}{SECRET}".encode()).decode()
    masked = mask(encoded)
    assert MASK in masked
    name = base64.b64encode(before.encode())
    assert len(masked) <= len(name) + len(MASK) + 4, "little more than the user's name is left"


@pytest.mark.parametrize(
    "text",
    [
        "http://user:PW@host:9000 cannot be reached",
        "https://PW@host/",
        "s3://user:P/PW@bucket/p",
        "GET https://b.example/k?X-Amz-Algorithm=A&X-Amz-Credential=mePW&X-Amz-Signature=SIGPW&x=1",
        "https://b.example/k?sv=1&amp;sig=SIGPW&amp;x=1",
        '{"url": "https://b.example/k?x=1\\u0026sig=SIGPW"}',
        "{'Authorization': 'Bearer abc.PW-def'}",
        "authorization: Basic dXNlPWPWcjpwYXNz",
        "Authorization: AWS4-HMAC-SHA256 Credential=PWme/2026, SignedHeaders=host, Signature=PWabcdef",
        "Set-Cookie: session=PW; Path=/",
        "X-Amz-Security-Token: PWabcdef",
        "token eyJhbGciOiJQWQ.eyJzdWIiOiPW.c2ln-PW is expired",
        "xoxb-12345678-PWabcdefgh",
    ],
)
def test_secret_is_recognized_by_its_form(text: str) -> None:
    assert "PW" not in mask(text)
    assert mask(mask(text)) == mask(text)


@pytest.mark.parametrize(
    "text",
    [
        "ref evernear-train@sha256:0 at http://host/a@b",
        "http://host:8080/a@b, http://[::1]:80/a@b and s3://bucket/a:b@c",
        "kubernetes.token_secret=evernear-token: it must begin with xoxb-",
        "set KFP_TOKEN or KFP_COOKIES; cookies: none; a Bearer token is missing",
        "https://host/path?prefix=a&max-keys=1",
    ],
)
def test_other_text_is_unchanged(text: str) -> None:
    assert mask(text) == text


def test_guessable_values_and_names_do_not_garble_the_output() -> None:
    variables = {
        "AWS_SECRET_ACCESS_KEY": "test",
        "EVERNEAR_TOKEN": "a",
        "AWS_ACCESS_KEY_ID": "evernear",
        "KUBERNETES_TOKEN_FILE": "/var/run/secrets/token",
        "EVERNEAR_KUBERNETES__TOKEN_SECRET": "name-of-a-secret",
        "TOKEN_SERVICE_PORT": "tcp://10.0.0.1:8080",
    }
    configure_masking(variables)
    text = f"evernear: a test of {variables}"
    assert mask(text) == text


def test_secrets_inside_values_are_masked() -> None:
    configure_masking(
        {
            "KFP_COOKIES": "authservice_session=MTY5ODc2NTQz; other=short",
            "OTEL_EXPORTER_OTLP_HEADERS": "api-key=0123456789abcdef,tenant=1",
            "HTTPS_PROXY": "http://user:p%40ssword-1@proxy:3128",
            "PRIVATE_KEY": "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQEF\n-----END PRIVATE KEY-----",
            "DOWNLOAD": "https://b.example/k?X-Amz-Signature=fedcba9876543210",
        }
    )
    assert mask("MTY5ODc2NTQz 0123456789abcdef p@ssword-1 kqhkiG9w0BAQEF fedcba9876543210") == " ".join([MASK] * 5)


def test_beginning_of_a_secret_is_not_printed_either() -> None:
    remember("0123456789abcdef")
    assert printable("key 0123456789abcdef is wrong", 10) == "key *** is..."


def copied(tmp_path: Path, program: str) -> bytes:
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        copy_masked(child.stdout, tmp_path / "log.txt")
    return (tmp_path / "log.txt").read_bytes()


def test_output_of_a_child_is_masked_even_in_pieces(tmp_path: Path) -> None:
    remember("0123456789abcdef")
    program = r"import os, time; os.write(1, b'\xff 0123456'); time.sleep(0.1); os.write(1, b'789abcdef\nend')"
    assert copied(tmp_path, program) == b"\xff ***\nend"


@pytest.mark.parametrize("before", [65_520, 32_750, 32_760, 32_770, 131_060])
def test_secret_in_a_very_long_line_is_masked(before: int, tmp_path: Path) -> None:
    remember("0123456789abcdef")
    program = f"import sys; sys.stdout.write('-' * {before} + '0123456789abcdef' + '-' * 200_000)"
    assert copied(tmp_path, program) == b"-" * before + b"***" + b"-" * 200_000


def test_output_before_a_kill_is_complete(tmp_path: Path) -> None:
    program = r"import os; os.write(1, b'first\nlast words'); os.kill(os.getpid(), 9)"
    assert copied(tmp_path, program) == b"first\nlast words"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_child_does_not_wait_for_a_full_disk() -> None:
    program = "import sys; sys.stdout.write('x' * 1_000_000 + chr(10))"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        copy = threading.Thread(target=copy_masked, args=(child.stdout, Path("/dev/full")))
        copy.start()
        assert child.wait(timeout=60) == 0
        copy.join()


def test_all_that_python_prints_is_masked() -> None:
    program = """
import logging, os, sys, threading, warnings
from evernear.common.masking import mask_streams
mask_streams()
token = os.environ["KFP_TOKEN"]
print(token); sys.stdout.writelines([token]); logging.warning("%s", token); warnings.warn(token)
thread = threading.Thread(target=lambda: int(token)); thread.start(); thread.join()
raise ValueError(token)
"""
    environment = {**os.environ, "KFP_TOKEN": "0123456789abcdef\n"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "0123456789abcdef" not in done.stdout + done.stderr
    assert done.stdout.count(MASK) == 2
    assert done.stderr.count(MASK) == 4, done.stderr


def test_records_of_a_run_are_masked(tmp_path: Path) -> None:
    remember("0123456789abcdef")
    store = open_store(tmp_path.as_uri())
    RunRecord(store, "1").save(settings={"index": {"uri": "http://a:0123456789abcdef@milvus:19530"}})
    assert RunRecord(store, "1").load("settings") == {"index": {"uri": "http://***@milvus:19530"}}


VARIABLES = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "KFP_TOKEN", "KFP_COOKIES"),
    *("EVERNEAR_TOKEN", "EVERNEAR_MILVUS_TOKEN", "SLACK_BOT_TOKEN", "SLACK_APP_TOKEN", "SLACK_SIGNING_SECRET"),
    *("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN", "GITHUB_TOKEN"),
    *("OTEL_EXPORTER_OTLP_HEADERS", "MODEL_REGISTRY_TOKEN", "WANDB_API_KEY"),
)
URLS = ("AWS_ENDPOINT_URL", "EVERNEAR_MILVUS_URI", "MLFLOW_TRACKING_URI", "MODEL_REGISTRY_BASE_URL", "DATABASE_URL")
PRINTS_ENVIRONMENT = r"""
import os
if "_EVERNEAR_EVENTS" in os.environ:  # in the processes of a run
    os.write(1, repr(dict(os.environ)).encode() + b"\n" + b"".join(v.encode() + b"\n" for v in os.environ.values()))
"""


def test_failing_run_writes_no_secret(tmp_path: Path) -> None:
    """Each process of the run writes its environment to its descriptor, before any of our code
    runs.

    The user's own ``pipelines`` and ``components`` on ``PYTHONPATH`` do not matter.
    """
    planted = {name: f"{name.replace('_', '')}-wJalrXUt\n" for name in VARIABLES}
    planted |= {name: f"http://user:{name.replace('_', '')}-wJalrXUt@127.0.0.1:9\n" for name in URLS}
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "sitecustomize.py").write_text(PRINTS_ENVIRONMENT)
    for name in ("pipelines", "components"):
        (tmp_path / "modules" / f"{name}.py").write_text("raise SystemExit('my own module')")
    workspace = Workspace(tmp_path, **planted, PYTHONPATH=str(tmp_path / "modules"))
    del workspace.environment["EVERNEAR_DATA__SOURCE"]
    failed = workspace.process("run", "--source", "s3://bucket/images", "--set", "target=registry")
    assert failed.returncode == 2, failed.stderr
    assert "AWS_ENDPOINT_URL='http://***@127.0.0.1:9' is not of the form https://host:port." in failed.stderr
    written = [path for path in workspace.workdir.rglob("*") if path.is_file()]
    assert any(path.name == "run.html" for path in written)
    assert not {path.name for path in written if b"wJalrXUt" in path.read_bytes()}
    assert "wJalrXUt" not in failed.stdout + failed.stderr
    log = next(workspace.workdir.glob("runs/*/log.txt")).read_text()
    assert all(f"'{name}': '***'" in log for name in VARIABLES)
