"""`evernear doctor` against stores and against loopback servers for Kubeflow Pipelines and
Slack."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from evernear.cli.app import app, main
from evernear.cli.doctor import SLACK_SCOPES
from evernear.errors import SettingsError
from evernear.kubeflow import GOLDEN, connection
from tests import ROOT
from tests.loopback.kfp import KfpServer
from tests.loopback.slack import SlackServer
from tests.loopback.slack.server import APP_TOKEN, BOT_TOKEN, Fault


def run_doctor(*arguments: str) -> tuple[int, dict[str, dict[str, object]]]:
    """The exit code and the finding of each part."""
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return result.exit_code, {finding["part"]: finding for finding in lines}


def test_store_checks_are_repeatable(tmp_path: Path, bucket: str) -> None:
    for store in (tmp_path.as_uri(), f"s3://{bucket}/prod"):
        for _ in range(2):
            code, findings = run_doctor("--set", f"store={store}")
            assert code == 0, findings
            assert list(findings) == ["store"], "nothing else is configured"
            assert "conditional writes; 0 releases, no champion yet." in str(findings["store"]["message"])


def test_missing_bucket_is_reported(bucket: str) -> None:
    code, findings = run_doctor("--set", f"store=s3://{bucket}-other")
    assert code == 1
    assert "does not exist" in str(findings["store"]["message"])


def test_pipelines_check_covers_token_upload_and_connection(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(connection, "BACKOFF_S", 0.01)
    options = ("pipelines", "--set", f"store={tmp_path.as_uri()}")
    with KfpServer(token="expected") as server:
        at = (*options, "--set", f"pipeline.endpoint={server.url}")
        assert run_doctor(*at)[0] == 1, "no token"
        monkeypatch.setenv("KFP_TOKEN", "expected")
        code, findings = run_doctor(*at)
        assert code == 1
        assert "upload it with `evernear pipeline upload`" in str(findings["pipelines"]["message"])
        server.publish(GOLDEN / "continuous_training.yaml", version="c0ffee1")
        code, findings = run_doctor(*at)
        assert code == 0
        assert f"{server.url} has continuous-training c0ffee1, no run yet." in str(findings["pipelines"]["message"])
    code, findings = run_doctor(*at)
    assert code == 1
    assert "is unreachable" in str(findings["pipelines"]["message"])


def test_slack_check_covers_tokens_and_scopes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with SlackServer() as slack:
        options = ("slack", "--set", f"store={tmp_path.as_uri()}", "--set", f"slack.api_url={slack.api_url}")
        code, findings = run_doctor(*options)
        assert code == 1
        assert "SLACK_BOT_TOKEN is missing" in str(findings["slack"]["message"])

        def with_tokens() -> tuple[int, str]:
            monkeypatch.setenv(
                "SLACK_BOT_TOKEN", BOT_TOKEN
            )  # evernear removes it from the environment when it reads it
            monkeypatch.setenv("SLACK_APP_TOKEN", APP_TOKEN)
            code, findings = run_doctor(*options)
            return code, str(findings["slack"]["message"])

        code, message = with_tokens()
        assert code == 0, message
        assert "slack.channel is not set" in message
        slack.faults["auth.test"] = Fault("invalid_auth")
        assert "set SLACK_BOT_TOKEN to the token of the installed app" in with_tokens()[1]
        slack.faults["apps.connections.open"] = Fault("invalid_auth")
        code, message = with_tokens()
        assert (code, "set SLACK_APP_TOKEN to the token of the installed app" in message) == (1, True)
        monkeypatch.setattr("tests.loopback.slack.server.SCOPES", "chat:write,commands")
        code, message = with_tokens()
        assert code == 1
        assert "lacks the scopes app_mentions:read, chat:write.public, files:write, usergroups:read" in message


def test_scopes_match_the_manifest() -> None:
    manifest = yaml.safe_load((ROOT / "deploy/slack/manifest.yaml").read_text())
    assert set(manifest["oauth_config"]["scopes"]["bot"]) == SLACK_SCOPES


def test_missing_library_does_not_prevent_other_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "slack_sdk.web", None)
    monkeypatch.delitem(sys.modules, "evernear.triggers.slack.client", raising=False)
    code, findings = run_doctor("slack", "store", "--set", f"store={tmp_path.as_uri()}")
    assert code == 1
    assert str(findings["slack"]["message"]).startswith("slack_sdk.web is not installed; run `pip install")
    assert findings["store"]["ok"]


def test_missing_library_of_a_command_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith("evernear.kubeflow")]:
        monkeypatch.delitem(sys.modules, name)  # another test may have imported them together with kfp
    monkeypatch.setattr(sys, "argv", ["evernear", "pipeline", "upload", "--image", f"r/x@sha256:{64 * 'a'}"])
    monkeypatch.setitem(sys.modules, "evernear.kubeflow.publish", None)
    with pytest.raises(ModuleNotFoundError):
        main()  # a missing module of our own is a bug and needs its traceback
    monkeypatch.delitem(sys.modules, "evernear.kubeflow.publish")
    monkeypatch.setitem(sys.modules, "kfp", None)
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == 1
    assert capsys.readouterr().err.startswith("evernear: kfp is not installed; run `pip install 'evernear[")


def test_unknown_part_is_rejected() -> None:
    with pytest.raises(SettingsError, match="Unknown part 'clusters'; known: store, cluster, pipelines, slack"):
        run_doctor("clusters")
