"""`evernear doctor` against stores, a Kubeflow Pipelines server and a Slack on loopback, well and ill."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from evernear.cli import app, main
from evernear.doctor import SLACK_SCOPES
from evernear.errors import SettingsError
from evernear.kubeflow import GOLDEN, connection
from tests.loopback.kfp import KfpServer
from tests.loopback.slack import SlackServer
from tests.loopback.slack.server import APP_TOKEN, BOT_TOKEN, Fault

ROOT = Path(__file__).parents[2]


def examined(*words: str) -> tuple[int, dict[str, dict[str, object]]]:
    """The exit code, and what was found of each part."""
    done = CliRunner().invoke(app, ["doctor", "--json", *words])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return done.exit_code, {finding["part"]: finding for finding in found}


def test_a_directory_and_a_bucket_are_tried_again_and_again(tmp_path: Path, bucket: str) -> None:
    for store in (tmp_path.as_uri(), f"s3://{bucket}/prod"):
        for _ in range(2):
            code, found = examined("--set", f"store={store}")
            assert code == 0, found
            assert list(found) == ["store"], "nothing else is configured"
            assert "conditionally too; 0 releases, no champion yet." in str(found["store"]["message"])


def test_a_bucket_that_is_not_there(bucket: str) -> None:
    code, found = examined("--set", f"store=s3://{bucket}-other")
    assert code == 1
    assert "There is no bucket" in str(found["store"]["message"])


def test_pipelines_not_reached_not_published_and_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(connection, "BACKOFF_S", 0.01)
    here = ("pipelines", "--set", f"store={tmp_path.as_uri()}")
    with KfpServer(token="expected") as server:
        at = (*here, "--set", f"pipeline.endpoint={server.url}")
        assert examined(*at)[0] == 1, "no token"
        monkeypatch.setenv("KFP_TOKEN", "expected")
        code, found = examined(*at)
        assert code == 1
        assert "`evernear pipeline upload` puts it there" in str(found["pipelines"]["message"])
        server.publish(GOLDEN / "continuous_training.yaml", version="c0ffee1")
        code, found = examined(*at)
        assert code == 0
        assert f"{server.url} has continuous-training c0ffee1, no run yet." in str(found["pipelines"]["message"])
    code, found = examined(*at)
    assert code == 1
    assert "cannot be reached" in str(found["pipelines"]["message"])


def test_slack_without_a_token_with_another_with_too_few_scopes_and_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with SlackServer() as slack:
        here = ("slack", "--set", f"store={tmp_path.as_uri()}", "--set", f"slack.api_url={slack.api_url}")
        code, found = examined(*here)
        assert code == 1
        assert "SLACK_BOT_TOKEN is missing" in str(found["slack"]["message"])

        def with_tokens() -> tuple[int, str]:
            monkeypatch.setenv("SLACK_BOT_TOKEN", BOT_TOKEN)  # it leaves the environment when it is read
            monkeypatch.setenv("SLACK_APP_TOKEN", APP_TOKEN)
            code, found = examined(*here)
            return code, str(found["slack"]["message"])

        code, message = with_tokens()
        assert code == 0, message
        assert "No slack.channel is set" in message
        slack.faults["auth.test"] = Fault("invalid_auth")
        assert "give the bot the token of the installed app" in with_tokens()[1]
        slack.faults["apps.connections.open"] = Fault("invalid_auth")
        assert with_tokens()[0] == 1
        monkeypatch.setattr("tests.loopback.slack.server.SCOPES", "chat:write,commands")
        code, message = with_tokens()
        assert code == 1
        assert "lacks the scopes app_mentions:read, chat:write.public, files:write, usergroups:read" in message


def test_the_scopes_are_those_of_the_manifest() -> None:
    manifest = yaml.safe_load((ROOT / "deploy/slack/manifest.yaml").read_text())
    assert set(manifest["oauth_config"]["scopes"]["bot"]) == SLACK_SCOPES


def test_a_part_whose_library_is_not_installed_hides_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "slack_sdk.web", None)
    code, found = examined("slack", "store", "--set", f"store={tmp_path.as_uri()}")
    assert code == 1
    assert str(found["slack"]["message"]).startswith("slack_sdk is not installed; run `pip install")
    assert found["store"]["well"]


def test_a_command_whose_library_is_not_installed_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith("evernear.kubeflow")]:
        monkeypatch.delitem(sys.modules, name)  # imported by another test, they would ask for kfp no more
    monkeypatch.setattr(sys, "argv", ["evernear", "pipeline", "compile", "--image", f"r/x@sha256:{64 * 'a'}"])
    monkeypatch.setitem(sys.modules, "evernear.kubeflow.compiled", None)
    with pytest.raises(ModuleNotFoundError):
        main()  # ours: a fault that wants its traceback
    monkeypatch.delitem(sys.modules, "evernear.kubeflow.compiled")
    monkeypatch.setitem(sys.modules, "kfp", None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("evernear: kfp is not installed; run `pip install 'evernear[")


def test_a_part_that_there_is_not_is_named() -> None:
    with pytest.raises(SettingsError, match="no part 'clusters' to look at; known: store, cluster, pipelines, slack"):
        examined("clusters")
