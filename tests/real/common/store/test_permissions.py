"""The policies of docs/object-store.md on servers that enforce them: each grants exactly the
required permissions."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import boto3
import pytest
import requests
from minio import Minio

from evernear.cli.doctor import check
from evernear.common.disk import sha256_bytes
from evernear.common.store import Store, open_store
from evernear.common.store.current import current_store
from evernear.common.store.s3 import S3Store
from evernear.errors import ConflictError, StoreError
from evernear.kubeflow import GOLDEN
from evernear.kubeflow.client import KfpRuns
from evernear.serving.query_log import ship_query_log
from evernear.settings import PipelineSettings, Settings
from evernear.triggers.requests import RequestStore
from evernear.triggers.watch.schedule_state import ScheduleStore
from tests import ROOT
from tests.loopback.kfp import KfpServer
from tests.seaweedfs import seaweedfs

USERS = ("reader", "writer", "server", "shipper", "watcher")
IMAGES, STORE = "s3://evernear-images", "s3://evernear-store/prod"
EMPTY = "s3://evernear-empty/prod"
"""A store that nobody has written."""
OBJECTS = {
    "evernear-images": ["1/a.png"],
    "evernear-store": ["prod/releases/champion.json", "prod/datasets/digits/head", "elsewhere/secret"],
    "evernear-empty": [],
}

UseKeys = Callable[[str], None]


@dataclass
class SecuredServer:
    """An S3 server with authorization."""

    endpoint: str
    keys: dict[str, tuple[str, str]]


@pytest.fixture(scope="module", params=["moto", "seaweedfs"])
def secured_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    start = moto_with_users if request.param == "moto" else seaweedfs_with_users
    with start(tmp_path_factory.mktemp(request.param)) as running:
        yield running


@contextmanager
def moto_with_users(directory: Path) -> Iterator[SecuredServer]:
    # A separate process, because authorization is global state in moto.
    command = [sys.executable, str(ROOT / "tests" / "atomic_moto.py")]
    environment = os.environ | {"INITIAL_NO_AUTH_ACTION_COUNT": "inf"}
    with (
        (directory / "log").open("wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
            keys = _create_users(endpoint)
            requests.post(f"{endpoint}/moto-api/reset-auth", data="0", timeout=10).raise_for_status()
            yield SecuredServer(endpoint, keys)
        finally:
            server.terminate()


def _create_users(endpoint: str) -> dict[str, tuple[str, str]]:
    """Create buckets, objects, and users with the published policies; return the users' keys."""
    anyone = {"aws_access_key_id": "any", "aws_secret_access_key": "any", "region_name": "us-east-1"}
    s3 = boto3.client("s3", endpoint_url=endpoint, **anyone)
    for bucket, names in OBJECTS.items():
        s3.create_bucket(Bucket=bucket)
        for name in names:
            s3.put_object(Bucket=bucket, Key=name, Body=b"content")
    iam = boto3.client("iam", endpoint_url=endpoint, **anyone)
    keys = {}
    for user, policy in published_policies().items():
        iam.create_user(UserName=user)
        iam.put_user_policy(UserName=user, PolicyName=user, PolicyDocument=json.dumps(json.loads(policy)))
        key = iam.create_access_key(UserName=user)["AccessKey"]
        keys[user] = (key["AccessKeyId"], key["SecretAccessKey"])
    return keys


@contextmanager
def seaweedfs_with_users(directory: Path) -> Iterator[SecuredServer]:
    policies = published_policies()
    keys = {user: (f"{user}-key", f"{user}-secret") for user in (*policies, "admin")}
    rights = {user: {"policyNames": [user]} for user in policies} | {"admin": {"actions": ["Admin"]}}
    identities = [
        {"name": user, "credentials": [{"accessKey": key, "secretKey": secret}], **rights[user]}
        for user, (key, secret) in keys.items()
    ]
    listed = [{"name": user, "content": policy} for user, policy in policies.items()]
    (directory / "s3.json").write_text(json.dumps({"identities": identities, "policies": listed}))
    with seaweedfs(directory / "data", directory / "s3.json") as server:
        admin = Minio(server.endpoint.removeprefix("http://"), *keys["admin"], secure=False, region="us-east-1")
        for bucket, names in OBJECTS.items():
            admin.make_bucket(bucket)
            for name in names:
                admin.put_object(bucket, name, BytesIO(b"content"), 7)
        yield SecuredServer(server.endpoint, keys)


def published_policies() -> dict[str, str]:
    """Return the policies of docs/object-store.md by user, also for the empty store."""
    text = (ROOT / "docs/object-store.md").read_text()
    policies = dict(zip(USERS, re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL), strict=True))
    return {user: _also_for(policy, "evernear-empty") for user, policy in policies.items()}


def _also_for(policy: str, bucket: str) -> str:
    tree = json.loads(policy)
    others = json.loads(policy.replace("evernear-store", bucket).replace("evernear-images", bucket + "-images"))
    return json.dumps(tree | {"Statement": tree["Statement"] + others["Statement"]})


@pytest.fixture
def use_keys(secured_server: SecuredServer, monkeypatch: pytest.MonkeyPatch) -> UseKeys:
    """``enter(user)`` sets the environment to the keys of that user."""

    def use_keys(user: str) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", secured_server.endpoint)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        for name, value in zip(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), secured_server.keys[user], strict=True):
            monkeypatch.setenv(name, value)

    return use_keys


def _refused(act: Callable[[], object], permission: str, location: str) -> None:
    with pytest.raises(StoreError) as raised:
        act()
    sentence = str(raised.value)
    assert sentence.startswith(f"{permission} on {location}")
    assert " is not permitted with these keys" in sentence
    assert sentence.endswith("; see docs/object-store.md.")
    assert raised.value.exit_code == 4


def _cannot_write(store: Store, uri: str) -> None:
    _refused(lambda: store.put("x", b"1"), "s3:PutObject", f"{uri}/x")
    _refused(lambda: store.put_if("x", b"1", None), "s3:PutObject", f"{uri}/.swap/probe-")
    _refused(lambda: store.delete("releases/champion.json"), "s3:DeleteObject", f"{uri}/releases/champion.json")


def test_reader_policy_allows_only_reading_images(use_keys: UseKeys, tmp_path: Path) -> None:
    use_keys("reader")
    images = open_store(IMAGES)
    assert list(images.folders()) == ["1"]
    assert [info.key for info in images.list("")] == ["1/a.png"]
    assert images.get("1/a.png") == b"content"
    assert images.find("1/absent.png") is None
    _refused(lambda: images.put("1/b.png", b"1"), "s3:PutObject", f"{IMAGES}/1/b.png")
    _refused(lambda: images.delete("1/a.png"), "s3:DeleteObject", f"{IMAGES}/1/a.png")
    store = open_store(STORE)
    _refused(lambda: list(store.list("")), "s3:ListBucket", STORE)
    _refused(lambda: store.fetch("releases/champion.json", tmp_path / "x"), "s3:GetObject", f"{STORE}/releases")
    assert list(tmp_path.iterdir()) == []


def test_writer_policy_allows_only_writing_the_store(use_keys: UseKeys, tmp_path: Path) -> None:
    use_keys("writer")
    store = S3Store("evernear-store", "prod")
    (tmp_path / "large").write_bytes(os.urandom(6 * 2**20))
    store.put("datasets/large", tmp_path / "large")
    assert sha256_bytes(store.get("datasets/large")) == sha256_bytes((tmp_path / "large").read_bytes())
    assert "releases/champion.json" in [info.key for info in store.list("")]
    etag = store.put_if("pointers/champion", b"1", None)
    store.put_if("pointers/champion", b"2", etag)
    with pytest.raises(ConflictError):
        store.put_if("pointers/champion", b"3", etag)
    _refused(lambda: store.delete("datasets/large"), "s3:DeleteObject", f"{STORE}/datasets/large")
    other = open_store("s3://evernear-store/elsewhere")
    _refused(lambda: other.get("secret"), "s3:GetObject", "s3://evernear-store/elsewhere/secret")
    _refused(lambda: other.put("secret", b"1"), "s3:PutObject", "s3://evernear-store/elsewhere/secret")
    _refused(lambda: open_store(IMAGES).get("1/a.png"), "s3:GetObject", f"{IMAGES}/1/a.png")


def test_server_policy_allows_only_reading_releases(use_keys: UseKeys, tmp_path: Path) -> None:
    use_keys("server")
    store = open_store(STORE)
    assert store.get("releases/champion.json") == b"content"
    assert store.find("releases/absent.json") is None
    assert [info.key for info in store.list("releases/")] == ["releases/champion.json"]
    assert store.fetch("releases/champion.json", tmp_path / "x").read_bytes() == b"content"
    _cannot_write(store, STORE)
    _refused(lambda: store.get("datasets/digits/head"), "s3:GetObject", f"{STORE}/datasets/digits/head")
    _refused(lambda: list(open_store(IMAGES).list("")), "s3:ListBucket", IMAGES)


def test_shipper_policy_allows_only_uploading_query_logs(use_keys: UseKeys, tmp_path: Path) -> None:
    use_keys("shipper")
    store = open_store(STORE)
    (tmp_path / "20270301T120000Z-v-host-1-a.jsonl").write_text("{}")
    assert ship_query_log(tmp_path, store) == 1
    _refused(lambda: store.get("queries/20270301/x"), "s3:GetObject", f"{STORE}/queries")
    _refused(lambda: store.put("releases/x", b"1"), "s3:PutObject", f"{STORE}/releases/x")
    _refused(lambda: list(store.list("")), "s3:ListBucket", STORE)


def test_watcher_policy_allows_only_proposals_and_query_cleanup(use_keys: UseKeys, tmp_path: Path) -> None:
    use_keys("watcher")
    store = open_store(STORE)
    assert ScheduleStore(store).switch(False, "U1").by == "U1"
    assert store.get("datasets/digits/head") == b"content"
    assert list(RequestStore(store).list()) == []
    store.delete("queries/20270301/old.jsonl")
    _refused(lambda: store.put("releases/champion.json", b"1"), "s3:PutObject", f"{STORE}/releases/champion.json")
    _refused(lambda: store.delete("releases/champion.json"), "s3:DeleteObject", f"{STORE}/releases/champion.json")
    _refused(lambda: store.put("queries/20270301/x", b"1"), "s3:PutObject", f"{STORE}/queries/20270301/x")


DOCTOR = {
    "writer": "allows reads, writes and conditional writes; 0 releases, no champion yet.",
    "watcher": "allows `evernear watch`, but no pipeline steps (s3:PutObject on ",
    "server": "allows `evernear serve --follow` and `evernear pod fetch` and `evernear prep`, but no pipeline steps (",
}


@pytest.mark.parametrize("user", [*DOCTOR, "shipper", "reader"])
def test_doctor_tests_what_the_role_needs(use_keys: UseKeys, user: str) -> None:
    use_keys(user)
    (found,) = check(Settings(store=EMPTY), ["store"])
    if user in DOCTOR:
        assert found.ok, found.message
        assert DOCTOR[user] in found.message
    else:
        assert not found.ok
        assert "is not permitted with these keys" in found.message


@pytest.mark.parametrize("user", ["writer", "watcher"])
def test_keys_that_start_runs_may_lock_their_start(use_keys: UseKeys, user: str) -> None:
    """The watcher starts trainings, and rolls back; steps' keys are those of the bot and the
    console. The lock is gone when the run stands."""
    use_keys(user)
    store = open_store(EMPTY)
    with KfpServer() as server:
        server.publish(GOLDEN / "rollback.yaml", version="1")
        runs = KfpRuns(PipelineSettings(endpoint=server.url))
        first = runs.start("rollback", {"store": EMPTY}, f"key-{user}", store)
        assert runs.start("rollback", {"store": EMPTY}, f"key-{user}", store).id == first.id
    assert list(store.list("runs/starting/")) == []


def test_writer_removes_pending_answers(use_keys: UseKeys) -> None:
    use_keys("writer")
    store = open_store(EMPTY)
    store.put("review/pending/image", b"")
    assert [info.key for info in store.list("review/pending/")] == ["review/pending/image"]
    store.delete("review/pending/image")
    assert list(store.list("review/pending/")) == []


def test_server_checks_the_version_of_the_store_with_its_keys(use_keys: UseKeys) -> None:
    use_keys("server")
    assert current_store(EMPTY).uri == EMPTY
    use_keys("shipper")
    assert current_store(EMPTY).uri == EMPTY


def test_wrong_and_unknown_keys_differ(
    use_keys: UseKeys, secured_server: SecuredServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_keys("server")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "guessed")
    with pytest.raises(StoreError, match=r"does not accept the keys \(SignatureDoesNotMatch\)"):
        open_store(STORE).get("releases/champion.json")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANOBODY")
    with pytest.raises(StoreError, match=r"does not accept the keys \(InvalidAccessKeyId\)"):
        open_store(STORE).get("releases/champion.json")
