"""Real steps in an Indexed Job on the fake cluster."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from evernear.common.parts import PartsRecord
from evernear.common.run_record import RunRecord
from evernear.common.store import open_store
from evernear.release.registry import Registry
from tests.command_line import evernear
from tests.loopback.kubernetes import LoopbackCluster
from tests.real.kubeflow.test_indexed_job import COMPONENT, jobs
from tests.releases import MakeRelease, System
from tests.slow.kubeflow import small_steps

__all__ = ["COMPONENT"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("step_image")]


def test_pods_predict_what_one_process_predicts(
    pipeline_cluster: LoopbackCluster, bucket: str, make_release: MakeRelease, tmp_path: Path
) -> None:
    source, store = open_store(f"s3://{bucket}/photos"), open_store(f"s3://{bucket}/store")
    random = np.random.default_rng(0)
    for number in range(9):
        Image.fromarray(random.integers(0, 255, (8, 8), np.uint8)).save(tmp_path / "image.png")
        source.put(f"{number}.png", tmp_path / "image.png")
    release = make_release()
    Registry(store).publish(release.archive)
    common = ["batch-predict", "--source", source.uri, "--store", store.uri, "--release", release.version]
    common += ["--part-images", "3", "--out"]
    done = evernear(*common, f"s3://{bucket}/out", "--nodes", "2")
    assert done.returncode == 0, done.stderr
    assert "3 of 3 parts on up to 2 nodes" in done.stderr
    assert evernear(*common, tmp_path / "local").returncode == 0
    for number in range(3):
        name = f"part-{number:06}.parquet"
        fetched = open_store(f"s3://{bucket}/out").fetch(name, tmp_path / name)
        assert pq.read_table(fetched).equals(pq.read_table(tmp_path / "local" / name))
    assert jobs(pipeline_cluster) == []


def test_step_ingests_on_nodes_what_it_ingests_alone(
    pipeline_cluster: LoopbackCluster, bucket: str, tmp_path: Path
) -> None:
    source, store = open_store(f"s3://{bucket}/photos"), open_store(f"s3://{bucket}/store")
    small_steps.put_photos(source, tmp_path)
    snapshots: list[Any] = []
    for run, nodes in (("on-nodes", 3), ("alone", 1)):
        manifest = small_steps.ingest(run, nodes, source.uri, store.uri, tmp_path)
        snapshots.append((manifest.digest, manifest.problems, manifest.problem_counts))
    assert snapshots[0] == snapshots[1]
    assert snapshots[0][2] == {"undecodable": 1}
    assert {(call.verb, call.kind.name) for call in pipeline_cluster.calls} == {
        ("get", "PodTemplate"), ("create", "Job"), ("get", "Job"), ("delete", "Job")
    }  # fmt: skip
    assert jobs(pipeline_cluster) == []
    ran = RunRecord(store, "on-nodes").find("parts_ingest", PartsRecord)
    assert ran is not None
    assert (ran.nodes, ran.parts, ran.retries) == (3, 7, 0)
    assert not [info.key for info in store.list("datasets/") if "/parts/" in info.key]


def test_step_embeds_on_nodes_what_it_embeds_alone(
    pipeline_cluster: LoopbackCluster, bucket: str, system: System, tmp_path: Path
) -> None:
    store = open_store(f"s3://{bucket}/store")
    dataset = small_steps.put_system(system, store, tmp_path)
    for run, nodes in (("on-nodes", 2), ("alone", 1)):
        made = small_steps.embed(run, nodes, system, dataset, store, tmp_path)
        assert made["computed"] == system.dataset.count("gallery") + system.dataset.count("query")
    assert small_steps.embedded(tmp_path / "on-nodes") == small_steps.embedded(tmp_path / "alone")
    assert jobs(pipeline_cluster) == []
    ran = RunRecord(store, "on-nodes").find("parts_embed", PartsRecord)
    assert ran is not None
    assert (ran.nodes, ran.parts, ran.retries, ran.cpus, ran.memory_bytes) == (2, 3, 0, 2.0, 4 * 2**30)
    assert ran.parts_s > 0
    assert RunRecord(store, "alone").find("parts_embed", PartsRecord) is None


def test_evaluation_is_the_same_when_nodes_embedded_the_test_split(
    pipeline_cluster: LoopbackCluster, bucket: str, system: System, make_release: MakeRelease, tmp_path: Path
) -> None:
    store, release = open_store(f"s3://{bucket}/store"), make_release()
    dataset = small_steps.put_system(system, store, tmp_path)
    Registry(store).publish(release.archive)
    Registry(store).set_champion(release.version, None)
    measured: list[dict[str, Any]] = []
    for run, nodes in (("on-nodes", 2), ("alone", 1)):
        small_steps.embed(run, nodes, system, dataset, store, tmp_path)
        cached = len([*store.list("embeddings/")])
        measured.append(small_steps.evaluate(run, system, dataset, store, tmp_path))
        assert (len([*store.list("embeddings/")]) == cached) == (nodes > 1), "nodes also embed the test split"
    assert measured[0]["champion"]["name"] == release.version
    assert measured[0] == measured[1]
    assert jobs(pipeline_cluster) == []
