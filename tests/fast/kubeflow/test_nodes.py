"""Where the parts of a step run: one process, a number of nodes, or automatically."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evernear.common.parts import Part, Parts, Worker
from evernear.common.run_parts import PodUsage, run_parts
from evernear.common.store import open_store
from evernear.errors import SettingsError
from evernear.kubeflow import nodes as nodes_module
from evernear.kubeflow.nodes import WORTH_A_NODE_S, Auto, StepNodes, nodes_for, nodes_of_ingest, require_nodes
from evernear.settings import RunSettings, load, of_run

IMAGE = "registry.example/evernear-train@sha256:" + "a" * 64


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts.make(open_store(tmp_path.as_uri()), "parts/run", "predict", {}, (Part(units=1) for _ in range(6)))


class RecordedJob:
    """A job that runs nothing and records what it would run."""

    def __init__(self) -> None:
        self.nodes, self.numbers = 0, list[int]()

    def __call__(self, nodes: int) -> "RecordedJob":
        self.nodes = nodes
        return self

    def run(self, parts: Parts, numbers: Sequence[int], on_done: Callable[[int], None]) -> PodUsage:
        self.numbers = [*numbers]
        on_done(len(numbers))
        return PodUsage(self.nodes, 0, None, None)


def auto(parts: Parts, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], max_nodes: int = 8) -> RecordedJob:
    """Run ``parts`` with a clock on which each part takes as long as ``seconds`` says."""
    now, job = [0.0], RecordedJob()
    monkeypatch.setattr(nodes_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def open_here(_: Parts) -> Worker:
        def work(number: int, _: bytes) -> bytes:
            now[0] += seconds.get(number, 0.0)
            return b"done"

        return work

    run_parts(parts, Auto(max_nodes, open_here, job), lambda *_: None)
    return job


def test_auto_adds_a_node_for_each_ten_minutes_of_the_rest(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    job = auto(parts, monkeypatch, {0: 300.0})
    assert (job.nodes, job.numbers) == (3, [1, 2, 3, 4, 5])  # 5 parts of 300 s


def test_auto_passes_over_parts_that_the_cache_answers(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    job = auto(parts, monkeypatch, {2: 900.0})
    assert parts.missing() == job.numbers == [3, 4, 5]
    assert job.nodes == 3  # a part each


def test_auto_needs_no_job_for_little_work(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    job = auto(parts, monkeypatch, dict.fromkeys(range(6), 100.0))
    assert job.numbers == []
    assert parts.missing() == []


@pytest.mark.parametrize(
    ("left_s", "parts", "max_nodes", "nodes"),
    [(0, 0, 8, 0), (WORTH_A_NODE_S, 9, 8, 1), (WORTH_A_NODE_S + 1, 9, 8, 2), (1e6, 9, 8, 8), (1e6, 3, 8, 3)],
)
def test_nodes_are_limited_by_work_parts_and_the_setting(left_s: float, parts: int, max_nodes: int, nodes: int) -> None:
    assert nodes_for(left_s, parts, max_nodes) == nodes


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
    data = chosen.data.model_copy(update={"nodes": "auto"})
    auto = chosen.model_copy(update={"data": data})
    require_nodes(auto)
    assert nodes_of_ingest(auto) == 1


@pytest.mark.parametrize(
    "source",
    ["s3://images", "table:s3://images/table.csv", "webdataset:s3://images"],
)
def test_source_in_a_bucket_may_use_several_nodes(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERNEAR_IMAGE", IMAGE)
    for nodes in (2, "auto"):
        data = {"nodes": nodes, "source": source}
        chosen = RunSettings.model_validate({"data": data, "store": "s3://bucket"})
        require_nodes(chosen)
        assert nodes_of_ingest(chosen) == nodes


@pytest.mark.parametrize("store", ["file:///data/store", "s3://bucket"])
def test_auto_without_a_cluster_is_one_process(store: str, parts: Parts) -> None:
    chosen = RunSettings.model_validate({"index": {"nodes": "auto"}, "store": store})
    require_nodes(chosen)
    nodes = StepNodes(chosen.index.nodes, chosen, lambda _: None)
    assert nodes.is_one
    nodes.run(parts, lambda _: lambda *_: b"done")
    assert nodes.ran is None
    assert nodes.summary() == ""
    assert parts.missing() == []


def test_nodes_are_a_number_or_auto() -> None:
    assert load(overrides=["index.nodes=auto"], environment={}).index.nodes == "auto"
    assert load(overrides=["data.nodes=3"], environment={}).data.nodes == 3
    assert repr(of_run({"index": {"nodes": 2.0}}).index.nodes) == "2", "Kubeflow Pipelines passes numbers as floats"
    for value in ("0", "many", "1.5", "true", ""):
        with pytest.raises(SettingsError, match=rf"index\.nodes = {value}: should be a number above 0, or auto"):
            load(overrides=[f"index.nodes={value}"], environment={})
