"""The main job from a user's view: run, status, predict, run again."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from evernear.kubeflow import local_run
from evernear.settings import load
from tests.real.scenarios.workspace import Workspace, write_digits, write_negatives

# test_promise.py tests the path from images to a live release in every run of the tests.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def live_workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Workspace, dict]]:
    """A workspace whose first release is live."""
    workspace = Workspace(tmp_path_factory.mktemp("served"))
    write_digits(workspace.directory / "images", labels="0123456789")
    yield workspace, workspace.run()
    workspace.command("stop")


def test_first_run_promotes_and_reports_its_paths(live_workspace: tuple[Workspace, dict]) -> None:
    _, result = live_workspace
    assert result["promoted"] is True
    assert result["state"] == "promoted"
    assert result["next_steps"][0] == ["recognize an image", "evernear predict IMAGE"]
    assert result["metrics"]["label_right"] > 0.9
    assert set(result["steps_s"]) >= {"ingest", "train", "gate", "archive", "deploy", "notify"}
    for path in result["paths"].values():
        assert Path(path).exists(), path
    assert "<svg" in Path(result["paths"]["train.curves"]).read_text()
    assert result["release"] in Path(result["paths"]["notify.outcome"]).read_text()


def test_equal_candidate_replaces_the_champion(
    live_workspace: tuple[Workspace, dict],
) -> None:
    workspace, first = live_workspace
    second = workspace.run()
    assert second["promoted"], second["reasons"]
    assert second["release"] > first["release"]
    assert "champion_label_right" in second["metrics"]
    status = json.loads(workspace.command("status", "--json").stdout)
    assert status["default"] == second["release"]
    assert first["release"] in status["registered"]


def test_reindex_adds_a_class_and_rollback_removes_it(live_workspace: tuple[Workspace, dict]) -> None:
    workspace, _ = live_workspace
    before = json.loads(workspace.command("registry", "show", champion_of(workspace), "--json").stdout)
    write_negatives(workspace.directory / "images", "negative", range(100))
    write_negatives(workspace.directory / "strangers", "negative", range(100, 110))
    result = workspace.run(command="reindex")
    assert result["promoted"], result["reasons"]
    assert "train" not in result["steps_s"]
    assert any("New: negative" in reason for reason in result["reasons"])

    after = json.loads(workspace.command("registry", "show", result["release"], "--json").stdout)
    assert after["network_sha256"] == before["network_sha256"]
    assert after["parent"] == before["version"]
    assert after["threshold"] == before["threshold"]
    shards = json.loads(Path(result["paths"]["embed.embeddings"], "embeddings.json").read_text())["shards"]
    reused = sum(shard["reused"] for shard in shards)
    # All 100 except those of the test split; the embeddings of the champion's images come from the
    # store.
    assert 80 <= sum(shard["count"] for shard in shards) - reused <= 100
    assert reused > 100

    strangers = [str(path) for path in sorted((workspace.directory / "strangers/negative").iterdir())]
    assert [answer["pred"] for answer in answers(workspace, strangers)] == ["negative"] * 10
    assert "Rules of the gate" in Path(result["page"]).read_text()

    arguments = pipeline_arguments(workspace) | {"reason": "negatives are not digits", "release": result["release"]}
    outcome = workspace.pipeline("rollback", **arguments)
    assert (outcome["state"], outcome["release"]) == ("rolled back", before["version"])
    assert outcome["reasons"] == ["negatives are not digits"]
    again = answers(workspace, strangers)
    assert {answer["version"] for answer in again} == {before["version"]}
    assert "negative" not in {answer["pred"] for answer in again}
    move = json.loads(workspace.command("registry", "list", "--history", "--json").stdout)[-1]
    assert (move["how"], move["why"], move["version"]) == ("rollback", "negatives are not digits", before["version"])

    refused = workspace.pipeline("rollback", **arguments)  # the same rollback again: that release is no longer live
    assert refused["state"] == "failed"
    assert f"The champion is now {before['version']}, not {result['release']}" in refused["reasons"][0]
    assert champion_of(workspace) == before["version"]

    arguments |= {"reason": "negatives are needed after all", "started_by": "ada"}
    outcome = workspace.pipeline("promote", **arguments)
    assert (outcome["state"], outcome["release"]) == ("promoted", result["release"])
    assert [answer["pred"] for answer in answers(workspace, strangers)] == ["negative"] * 10
    move = json.loads(workspace.command("registry", "list", "--history", "--json").stdout)[-1]
    assert (move["how"], move["why"], move["by"]) == ("force", "negatives are needed after all", "ada")
    assert workspace.command("registry", "rollback").returncode == 0
    assert champion_of(workspace) == before["version"]


def champion_of(workspace: Workspace) -> str:
    releases = json.loads(workspace.command("registry", "list", "--json").stdout)
    return next(release["version"] for release in releases if release["champion"])


def answers(workspace: Workspace, files: list[str]) -> list[dict]:
    completed = workspace.command("predict", "--json", *files)
    return [json.loads(line) for line in completed.stdout.splitlines()]


def pipeline_arguments(workspace: Workspace) -> dict[str, object]:
    """Arguments of the rollback pipeline for the live release of the workspace."""
    settings = load(environment=workspace.environment)
    named = ("store", "target", "settings")
    return {name: value for name, value in local_run.pipeline_arguments(settings, {}).items() if name in named}


def test_model_trained_on_shuffled_labels_is_not_promoted(live_workspace: tuple[Workspace, dict]) -> None:
    workspace, _ = live_workspace
    champion = json.loads(workspace.command("status", "--json").stdout)["champion"]
    write_digits(workspace.directory / "shuffled", labels="0123456789", shuffle_labels=True)
    source = ("--source", f"folder:{workspace.directory / 'shuffled'}", "--set", "data.dataset=shuffled")
    completed = workspace.process("run", "--preset", "quick", *source)
    # The training usually detects this; if an epoch is above chance by luck, the gate does.
    assert re.search("The network learned nothing|labels had been shuffled", completed.stdout + completed.stderr)
    status = json.loads(workspace.command("status", "--json").stdout)
    assert (status["champion"], status["default"]) == (champion, champion)


def test_stop_and_serve_restart_the_champion(live_workspace: tuple[Workspace, dict]) -> None:
    workspace, _ = live_workspace
    champion = json.loads(workspace.command("status", "--json").stdout)["champion"]
    image = str(next((workspace.directory / "images/5").iterdir()))
    assert workspace.command("stop").returncode == 0
    assert workspace.refused("predict", image)[0] == 4
    with workspace.start("serve", "--foreground") as server:
        assert server.stdout is not None
        assert champion in server.stdout.readline()
        completed = workspace.command("predict", "--json", image)
        assert json.loads(completed.stdout)["version"] == champion
        server.terminate()
        assert server.wait(30) == 0
    assert json.loads(workspace.command("status", "--json").stdout)["server"] == "down"
