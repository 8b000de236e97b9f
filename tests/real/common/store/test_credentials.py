"""Keys of AWS's usual sources, asked of servers that check what the real ones check."""

import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from evernear.cli.doctor import check
from evernear.common.masking import mask
from evernear.common.store import credentials, open_store
from evernear.common.store.s3 import S3Store
from evernear.errors import SettingsError, StoreError, TransientStoreError
from evernear.settings import Settings
from tests.environment import NO_AWS
from tests.loopback.aws import CONTAINER_PATH, ROLE, LoopbackAWS, loopback_aws

pytestmark = pytest.mark.usefixtures("quick")
Use = Callable[[str], None]
SOURCES = {
    "environment": "AWS_ACCESS_KEY_ID",
    "web identity": f"the web identity of {ROLE}",
    "profile": "the profile 'team' in ",
    "config": "the profile 'team' in ",
    "ecs": "the role of this container",
    "pod identity": "the role of this container",
    "ec2": "the role of this EC2 instance",
}
RENEWED = [name for name in SOURCES if name not in ("environment", "profile", "config")]


@pytest.fixture
def aws(bucket: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackAWS]:
    """AWS on loopback, with a bucket, and a process without keys on a machine of another maker."""
    if "TEST_S3_URL" in os.environ:
        pytest.skip("the server at TEST_S3_URL knows only its own keys")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", *NO_AWS):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(credentials, "DMI", tmp_path / "dmi")
    with loopback_aws(s3_endpoint) as aws:
        monkeypatch.setattr(credentials, "_now", lambda: aws.now)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", aws.url)
        yield aws


@pytest.fixture
def use(aws: LoopbackAWS, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Use:
    """Give the process one source of keys."""

    def use(source: str) -> None:
        aws.permanent["AKIALOOPBACK00000000"] = "permanent-secret"
        keys = "aws_access_key_id = AKIALOOPBACK00000000\naws_secret_access_key = permanent-secret\n"
        (tmp_path / ".aws").mkdir(exist_ok=True)
        match source:
            case "environment":
                monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIALOOPBACK00000000")
                monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "permanent-secret")
            case "web identity":
                (tmp_path / "jwt").write_text(aws.web_identity)
                monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "jwt"))
                monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
                monkeypatch.setenv("AWS_ENDPOINT_URL_STS", aws.url)
            case "profile":
                (tmp_path / ".aws/credentials").write_text(f"[default]\n[team]\n{keys}")
                monkeypatch.setenv("AWS_PROFILE", "team")
            case "config":
                (tmp_path / "config").write_text(f"[profile team]\nregion = eu-west-3\n{keys}")
                monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
                monkeypatch.setenv("AWS_PROFILE", "team")
                monkeypatch.delenv("AWS_REGION")
            case "ecs":
                monkeypatch.setattr(credentials, "CONTAINER_URI", aws.url)
                monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", CONTAINER_PATH)
                monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", aws.container_token)
            case "pod identity":
                (tmp_path / "token").write_text(aws.container_token)
                monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{aws.url}{CONTAINER_PATH}")
                monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
            case _:
                monkeypatch.setattr(credentials, "INSTANCE_URI", aws.url)
                (tmp_path / "dmi").mkdir(exist_ok=True)
                (tmp_path / "dmi/sys_vendor").write_text("Amazon EC2\n")

    return use


def _uses_both_clients(store: S3Store, aws: LoopbackAWS) -> None:
    """Both send signed requests, which the server accepted."""
    aws.signed_by.clear()
    store.put("a b/x+1", b"content")
    assert store.get("a b/x+1") == store.reader()("a b/x+1") == b"content"
    assert [info.key for info in store.list("a")] == ["a b/x+1"]
    assert len(aws.signed_by) == 4  # the reader's request was not repeated by the other client
    assert "" not in aws.signed_by


@pytest.mark.parametrize("source", SOURCES)
def test_each_source_signs_the_requests_of_both_clients(source: str, use: Use, aws: LoopbackAWS, bucket: str) -> None:
    use(source)
    store = S3Store(bucket, "prefix")
    assert store.identity.startswith(SOURCES[source])
    _uses_both_clients(store, aws)
    asked = len(aws.asked)
    assert bool(asked) == (source in RENEWED)
    _uses_both_clients(S3Store(bucket, "prefix"), aws)
    assert len(aws.asked) == asked  # a process asks once


@pytest.mark.parametrize("source", SOURCES)
def test_doctor_names_the_source(source: str, use: Use, bucket: str) -> None:
    use(source)
    (found,) = check(Settings(store=f"s3://{bucket}/prefix"), ["store"])
    assert found.ok, found.message
    assert SOURCES[source] in found.message


@pytest.mark.parametrize("source", RENEWED)
def test_keys_are_renewed_and_masked_during_a_run(
    source: str, use: Use, aws: LoopbackAWS, bucket: str, tmp_path: Path
) -> None:
    use(source)
    store = S3Store(bucket, "prefix")
    read = store.reader()
    _uses_both_clients(store, aws)
    aws.now += timedelta(minutes=56)  # the first keys are valid for four more minutes
    _uses_both_clients(store, aws)
    assert {aws.issued[-1].access_key} == set(aws.signed_by)
    assert len(aws.issued) == 2
    aws.now += timedelta(hours=2)  # all keys have expired
    aws.web_identity = aws.web_identity.replace("first", "second")  # the kubelet has replaced it
    if source == "web identity":
        (tmp_path / "jwt").write_text(aws.web_identity)
    aws.signed_by.clear()
    assert read("a b/x+1") == b"content"
    _uses_both_clients(store, aws)
    assert len(aws.issued) == 3
    for keys in aws.issued:
        assert mask(f"{keys.access_key} {keys.secret_key} {keys.session_token}") == "*** *** ***"


@pytest.mark.parametrize("source", RENEWED)
def test_valid_keys_outlast_an_outage_of_their_server(
    source: str, use: Use, aws: LoopbackAWS, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(source)
    store = S3Store(bucket, "prefix")
    store.put("x", b"1")
    aws.down = True
    aws.now += timedelta(minutes=56)
    assert store.get("x") == b"1"
    aws.now += timedelta(minutes=30)
    with pytest.raises(TransientStoreError, match=r"There are no keys for .* answers 503") as raised:
        store.get("x")
    assert aws.web_identity not in str(raised.value)
    aws.down = False
    assert store.get("x") == b"1"


@pytest.mark.parametrize(
    ("source", "variable", "sentence"),
    [
        ("web identity", "AWS_ROLE_ARN", r"There are no keys for .* answers 403 AccessDenied; check the role's trust"),
        ("web identity", "AWS_WEB_IDENTITY_TOKEN_FILE", r"AWS_WEB_IDENTITY_TOKEN_FILE=.* cannot be read: No such file"),
        ("pod identity", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", r"AUTHORIZATION_TOKEN_FILE=.* No such file"),
        ("ecs", "AWS_CONTAINER_AUTHORIZATION_TOKEN", r"There are no keys for .* 400 AccessDeniedException; check its"),
        ("pod identity", "AWS_CONTAINER_CREDENTIALS_FULL_URI", r"is neither https:// nor on this machine"),
        ("web identity", "AWS_ENDPOINT_URL_STS", r"AWS_ENDPOINT_URL_STS='http://\[wrong' is not of the form"),
        ("instance", "AWS_EC2_METADATA_SERVICE_ENDPOINT", r"_ENDPOINT='http://\[wrong' is not of the form"),
        (
            "profile",
            "AWS_PROFILE",
            r"The profile 'http://wrong' \(AWS_PROFILE\) is in neither .*credentials nor .*config\.",
        ),
    ],
)
def test_refusal_is_one_sentence_without_the_token(
    source: str, variable: str, sentence: str, use: Use, aws: LoopbackAWS, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(source)
    monkeypatch.setenv(variable, "http://[wrong" if "ENDPOINT" in variable else "http://wrong")
    with pytest.raises((StoreError, SettingsError), match=sentence) as raised:
        S3Store(bucket, "prefix").get("x")
    assert "\n" not in str(raised.value)
    assert aws.web_identity not in str(raised.value)
    assert aws.container_token not in str(raised.value)
    assert aws.signed_by == []


@pytest.mark.parametrize(
    ("setting", "way"),
    [
        ("role_arn = arn:aws:iam::1:role/x\nsource_profile = base", "a role (role_arn)"),
        ("sso_session = corp", "SSO (sso_session)"),
        ("sso_start_url = https://corp.example", "SSO (sso_start_url)"),
        ("credential_process = /usr/bin/keys", "a process (credential_process)"),
    ],
)
def test_profile_that_needs_another_way_is_named(
    setting: str, way: str, aws: LoopbackAWS, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/config").write_text(f"[profile team]\n{setting}\n")
    monkeypatch.setenv("AWS_PROFILE", "team")
    with pytest.raises(SettingsError) as raised:
        S3Store(bucket, "prefix")
    assert str(raised.value).startswith(f"The profile 'team' needs {way}, which evernear does not support; run")


def test_profile_without_a_secret_key_is_named(
    aws: LoopbackAWS, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[team]\naws_access_key_id = AKIA\n")
    monkeypatch.setenv("AWS_PROFILE", "team")
    with pytest.raises(SettingsError, match=r"The profile 'team' in .*/credentials has no aws_secret_access_key"):
        S3Store(bucket, "prefix")


def test_shared_files_name_the_server(
    aws: LoopbackAWS, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A profile's private server must not be replaced with AWS."""
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    (tmp_path / ".aws").mkdir()
    for text in ("endpoint_url = {}", "services = local\n[services local]\ns3 =\n  endpoint_url = {}"):
        (tmp_path / ".aws/config").write_text(f"[default]\n{text.format(aws.url)}\n")
        assert S3Store(bucket, "prefix")._connection.endpoint == aws.url
    (tmp_path / ".aws/config").write_text("[default]\nendpoint_url = nowhere\n")
    with pytest.raises(SettingsError, match=r"endpoint_url of the profile default='nowhere' is not of the form"):
        S3Store(bucket, "prefix")
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert S3Store(bucket, "prefix")._connection.endpoint == "https://s3.amazonaws.com"


def test_endpoint_of_s3_precedes_the_general_one(
    use: Use, aws: LoopbackAWS, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("environment")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    _uses_both_clients(S3Store(bucket, "prefix"), aws)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    with pytest.raises(TransientStoreError, match=r"reached: .*Connection refused; check AWS_ENDPOINT_URL_S3\."):
        S3Store(bucket, "prefix").get("x")


def test_machine_that_is_not_of_amazon_asks_nobody(
    aws: LoopbackAWS, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "INSTANCE_URI", aws.url)
    store = open_store(f"s3://{bucket}/prefix")
    assert store.identity == ""
    for read in (store.get, store.reader()):
        with pytest.raises(StoreError):  # moto admits nobody without keys
            read("x")
    assert aws.asked == []
    assert len(aws.signed_by) > 2
    assert set(aws.signed_by) == {""}


@pytest.mark.parametrize("variables", [{"AWS_EC2_METADATA_DISABLED": "true"}, {}])
def test_instance_without_a_role_is_asked_once(
    variables: dict[str, str], use: Use, aws: LoopbackAWS, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("ec2")
    aws.has_instance_role = False
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for _ in range(3):
        assert S3Store(bucket, "prefix").identity == ""
    assert len(aws.asked) == (0 if variables else 2)  # a token, then the name of the role


def test_metadata_server_that_does_not_answer_is_asked_once(
    aws: LoopbackAWS, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert credentials.INSTANCE_TIMEOUT_S == 1
    monkeypatch.setattr(credentials, "INSTANCE_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for _ in range(3):
            assert S3Store(bucket, "prefix").identity == ""
        silent.settimeout(5)
        silent.accept()[0].close()
        silent.settimeout(0.01)
        with pytest.raises(TimeoutError):
            silent.accept()
