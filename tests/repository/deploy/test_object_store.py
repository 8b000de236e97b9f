"""The local overlay's object store: its scripts, and, if ``TEST_WEED`` names a binary, a real
SeaweedFS."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import grpc
import psutil
import pytest
import yaml
from minio import Minio
from minio.error import S3Error
from urllib3.exceptions import HTTPError

from evernear.common.store.roles import POLICIES
from evernear.common.store.s3 import S3Store
from tests import ROOT
from tests.repository.deploy.rendered import DEPLOY, named, objects
from tests.seaweedfs import SERVER, SeaweedFS, seaweedfs
from tests.waiting import until

SETUP = DEPLOY / "overlays/local/seaweedfs"
USERS = {
    "admin": None,
    "pipeline": ["images", "pipeline"],
    "reader": ["reader"],
    "queries": ["queries"],
    "watch": ["images", "watch"],
}
SECRETS = {
    "admin": "evernear-s3-admin",
    "pipeline": "evernear-s3",
    "reader": "evernear-s3-reader",
    "queries": "evernear-s3-queries",
    "watch": "evernear-s3-watch",
}
PATHS = (
    "evernear/releases/champion.json",
    "evernear/datasets/head",
    "evernear/queries/old",
    "evernear/triggers/watch.json",
    "evernear/.swap/probe",
    "evernear/runs/starting/lock",
    "evernear/review/pending/image",
    "evernear-images/1/a.png",
)
ALLOWED: dict[str, dict[str, set[str]]] = {
    "pipeline": {
        "read": {*PATHS},
        "list": {"evernear", "evernear-images"},
        "write": {*PATHS[:7]},
        "delete": {*PATHS[4:7]},
    },
    "reader": {"read": {PATHS[0]}, "list": {"evernear"}, "write": set(), "delete": set()},
    "queries": {"read": set(), "list": set(), "write": {"evernear/queries/old"}, "delete": set()},
    "watch": {
        "read": {*PATHS},
        "list": {"evernear", "evernear-images"},
        "write": {"evernear/triggers/watch.json", "evernear/.swap/probe", "evernear/runs/starting/lock"},
        "delete": {"evernear/queries/old", "evernear/.swap/probe", "evernear/runs/starting/lock"},
    },
}


def identities(file: Path, *users: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the init container's script."""
    keys = {f"{user.upper()}_ACCESS_KEY": f"{user}-key" for user in users}
    keys |= {f"{user.upper()}_SECRET_KEY": f"{user}-secret/+=" for user in users}
    command = ["sh", str(SETUP / "identities.sh"), str(file), *users]
    return subprocess.run(command, env={"PATH": os.environ["PATH"]} | keys | changes, capture_output=True, text=True)


def test_users_have_the_documented_rights(tmp_path: Path) -> None:
    completed = identities(tmp_path / "s3.json", *USERS)
    assert completed.returncode == 0, completed.stderr
    assert (tmp_path / "s3.json").stat().st_mode & 0o077 == 0
    written = json.loads((tmp_path / "s3.json").read_text())
    assert {item["name"]: item.get("policyNames") for item in written["identities"]} == USERS
    assert [item["name"] for item in written["identities"] if "actions" in item] == ["admin"]
    for item in written["identities"]:
        name = item["name"]
        assert item["credentials"] == [{"accessKey": f"{name}-key", "secretKey": f"{name}-secret/+="}]
    blocks = (ROOT / "docs/object-store.md").read_text().split("```json\n")[1:]
    policies = {item["name"]: json.loads(item["content"]) for item in written["policies"]}
    assert policies.keys() == POLICIES.keys()
    for (name, role), block in zip(POLICIES.items(), blocks, strict=True):
        of_images = name == "images"
        assert policies[name]["Statement"] == role.statements("evernear-images" if of_images else "evernear"), name
        documented = ("evernear-images",) if of_images else ("evernear-store", "prod")
        assert json.loads(block.partition("```")[0])["Statement"] == role.statements(*documented), name


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"READER_SECRET_KEY": ""}, "A key of the user reader is empty"),
        ({"READER_ACCESS_KEY": 'a", "actions": ["Admin"], "x": "'}, "A key of the user reader is empty, or has other"),
    ],
)
def test_empty_keys_and_keys_with_json_syntax_are_rejected(
    tmp_path: Path, changes: dict[str, str], sentence: str
) -> None:
    completed = identities(tmp_path / "s3.json", "reader", **changes)
    assert completed.returncode == 1
    assert sentence in completed.stderr
    assert not (tmp_path / "s3.json").exists()


def test_each_user_has_a_separate_secret_and_the_pod_has_every_script() -> None:
    (init,) = SERVER["initContainers"]
    assert init["command"][:3] == ["/bin/sh", "/setup/identities.sh", "/identities/s3.json"]
    assert init["command"][3:] == list(USERS)
    references = {item["name"]: item["valueFrom"]["secretKeyRef"] for item in init["env"]}
    for user, secret in SECRETS.items():
        assert references[f"{user.upper()}_ACCESS_KEY"] == {"name": secret, "key": "AWS_ACCESS_KEY_ID"}
        assert references[f"{user.upper()}_SECRET_KEY"] == {"name": secret, "key": "AWS_SECRET_ACCESS_KEY"}
    (volume,) = (item for item in SERVER["volumes"] if item["name"] == "setup")
    del volume["configMap"]["name"]
    deployment = named(objects("local"), "Deployment")["evernear-seaweedfs"]["spec"]["template"]["spec"]
    (volume,) = (item for item in deployment["volumes"] if item["name"] == "setup")
    files = named(objects("local"), "ConfigMap")[volume["configMap"]["name"]]["data"]
    assert files == {path.name: path.read_text() for path in SETUP.iterdir()}
    for script in ("identities.sh", "buckets.sh"):
        assert subprocess.run(["sh", "-n"], input=files[script], text=True).returncode == 0


def test_compose_runs_the_same_server() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["seaweedfs"]
    (container,) = SERVER["containers"]
    assert compose["image"] == container["image"]
    arguments = {word for word in container["args"] if "config" not in word}
    assert arguments <= {*compose["command"][0].split()}
    guarded = {item["name"]: item["value"] for item in container["env"]}
    assert guarded.items() <= compose["environment"].items()


@contextmanager
def trial(directory: Path, **changes: str) -> Iterator[SeaweedFS]:
    completed = identities(directory / "s3.json", *USERS, **changes)
    assert completed.returncode == 0, completed.stderr
    with seaweedfs(directory / "data", directory / "s3.json") as server:
        server.make_buckets("evernear", "evernear-images")
        yield server


def client(server: SeaweedFS, user: str) -> Minio:
    keys = f"{user}-key", f"{user}-secret/+="
    return Minio(server.endpoint.removeprefix("http://"), *keys, secure=False, region="us-east-1")


@pytest.fixture(scope="module")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    with trial(tmp_path_factory.mktemp("trial")) as running:
        yield running


def fill(server: SeaweedFS) -> None:
    admin = client(server, "admin")
    for path in PATHS:
        bucket, _, key = path.partition("/")
        admin.put_object(bucket, key, BytesIO(b"content"), 7)


def content(server: SeaweedFS, bucket: str, key: str) -> bytes | None:
    """None while the volume server of a server that has just started is not connected yet."""
    try:
        return client(server, "pipeline").get_object(bucket, key).read()
    except (S3Error, HTTPError):
        return None


def permitted(act: Callable[[], object]) -> bool:
    try:
        act()
    except S3Error as error:
        if error.code != "AccessDenied":
            raise
        return False
    return True


@pytest.mark.parametrize("user", ALLOWED)
def test_user_has_exactly_its_rights(object_store: SeaweedFS, user: str) -> None:
    granted: dict[str, set[str]] = {}
    store = client(object_store, user)
    for action, act in {
        "read": lambda bucket, key: store.get_object(bucket, key).read(),
        "write": lambda bucket, key: store.put_object(bucket, key, BytesIO(b"other"), 5),
        "delete": lambda bucket, key: store.remove_object(bucket, key),
    }.items():
        fill(object_store)
        granted[action] = {path for path in PATHS if permitted(lambda: act(*path.split("/", 1)))}  # noqa: B023
    buckets = ("evernear", "evernear-images")
    granted["list"] = {name for name in buckets if permitted(lambda: list(store.list_objects(name, recursive=True)))}  # noqa: B023
    assert granted == ALLOWED[user]
    assert not permitted(lambda: store.make_bucket("another"))
    assert not permitted(lambda: store.put_object("another", "x", BytesIO(b"x"), 1))
    assert not permitted(lambda: store.remove_bucket("evernear"))
    assert not permitted(lambda: store.set_bucket_policy("evernear", '{"Version": "2012-10-17", "Statement": []}'))


def test_anonymous_access_is_denied(object_store: SeaweedFS) -> None:
    fill(object_store)
    anonymous = Minio(object_store.endpoint.removeprefix("http://"), secure=False, region="us-east-1")
    for act in (
        lambda: anonymous.get_object("evernear", "releases/champion.json"),
        lambda: anonymous.put_object("evernear", "releases/champion.json", BytesIO(b"x"), 1),
        lambda: list(anonymous.list_objects("evernear")),
    ):
        assert not permitted(act)


def test_only_the_s3_ports_listen_beyond_loopback(object_store: SeaweedFS) -> None:
    listening = [
        item.laddr for item in psutil.Process(object_store.pid).net_connections("tcp") if item.status == "LISTEN"
    ]
    outside = {address.port for address in listening if address.ip != "127.0.0.1"}
    assert outside == {object_store.ports["s3.port"], object_store.ports["s3.port.grpc"]}
    assert {address.port for address in listening} == {*object_store.ports.values()}
    # Without protection, the gRPC port would list policies to anyone and accept new users.
    with grpc.insecure_channel(f"127.0.0.1:{object_store.ports['s3.port.grpc']}") as channel:
        ask = channel.unary_unary("/messaging_pb.SeaweedS3IamCache/ListPolicies")
        with pytest.raises(grpc.RpcError) as refused:
            ask(b"", timeout=10)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


def test_conditional_writes_have_one_winner(object_store: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_store.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "pipeline-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "pipeline-secret/+=")
    assert S3Store("evernear", "").race_winners == (1, 1)


def test_restart_keeps_objects_and_applies_new_keys(tmp_path: Path) -> None:
    with trial(tmp_path) as first:
        fill(first)
        assert client(first, "reader").get_object("evernear", "releases/champion.json").read() == b"content"
    with trial(tmp_path, READER_SECRET_KEY="another") as second:
        with pytest.raises(S3Error, match="SignatureDoesNotMatch"):
            client(second, "reader").get_object("evernear", "releases/champion.json")
        assert until(lambda: content(second, "evernear", "releases/champion.json")) == b"content"
        second.make_buckets("evernear", "evernear-images")  # idempotent
        assert client(second, "pipeline").get_object("evernear-images", "1/a.png").read() == b"content"
