"""Where the parts of a step run: in one process, or on a number of nodes."""

from pathlib import Path
from typing import Any

import pytest

from evernear.common.parts import Part, Parts
from evernear.common.store import open_store
from evernear.errors import SettingsError
from evernear.kubeflow.nodes import StepNodes, require_nodes
from evernear.settings import RunSettings, load, of_run

IMAGE = "registry.example/evernear-train@sha256:" + "a" * 64


@pytest.mark.parametrize("section", ["data", "index"])
def test_several_nodes_need_a_bucket_and_an_image(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree: dict[str, Any] = {"data": {"source": "s3://images"}, "store": "file:///data/store"}
    tree[section] = {"nodes": 2, **(tree["data"] if section == "data" else {})}
    folder = RunSettings.model_validate(tree)
    with pytest.raises(SettingsError, match=r"Other nodes cannot reach the store, file:///data/store; use s3://"):
        require_nodes(folder)
    bucket = RunSettings.model_validate({**tree, "store": "s3://bucket"})
    with pytest.raises(SettingsError, match="set the environment variable EVERNEAR_IMAGE="):
        require_nodes(bucket)
    monkeypatch.setenv("EVERNEAR_IMAGE", IMAGE)
    require_nodes(bucket)


@pytest.mark.parametrize(
    ("source", "location"),
    [("digits", "digits"), ("folder:/data/images", "/data/images"), ("table:/data/table.csv", "/data/table.csv")],
)
def test_several_nodes_need_a_source_in_a_bucket(source: str, location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERNEAR_IMAGE", IMAGE)
    chosen = RunSettings.model_validate({"data": {"nodes": 2, "source": source}, "store": "s3://bucket"})
    with pytest.raises(SettingsError, match=rf"Other nodes cannot reach the source, {location}; use s3://.*one node"):
        require_nodes(chosen)


@pytest.mark.parametrize("source", ["s3://images", "table:s3://images/table.csv", "webdataset:s3://images"])
def test_source_in_a_bucket_may_use_several_nodes(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a run then lacks is the image of the nodes."""
    chosen = RunSettings.model_validate({"data": {"nodes": 2, "source": source}, "store": "s3://bucket"})
    with pytest.raises(SettingsError, match="set the environment variable EVERNEAR_IMAGE="):
        require_nodes(chosen)
    monkeypatch.setenv("EVERNEAR_IMAGE", IMAGE)
    require_nodes(chosen)


def test_one_node_is_the_process_of_the_step(tmp_path: Path) -> None:
    parts = Parts.make(open_store(tmp_path.as_uri()), "parts/run", "predict", {}, (Part(units=1) for _ in range(6)))
    nodes = StepNodes(1, lambda _: None)
    nodes.run(parts, lambda _: lambda *_: b"done")
    assert nodes.ran is None
    assert nodes.summary() == ""
    assert parts.missing() == []


def test_nodes_are_a_number() -> None:
    assert load(overrides=["data.nodes=3"], environment={}).data.nodes == 3
    assert repr(of_run({"index": {"nodes": 2.0}}).index.nodes) == "2", "Kubeflow Pipelines passes numbers as floats"
    for value in ("0", "auto", "1.5", "true", ""):
        with pytest.raises(SettingsError, match=rf"index\.nodes = {value}"):
            load(overrides=[f"index.nodes={value}"], environment={})
