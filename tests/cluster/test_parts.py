"""Steps in Indexed Jobs of a real cluster, with the rights of the pipeline's account.

``tests/slow/kubeflow/test_indexed_job.py`` has the same on loopback. These tests also need this
checkout's training image by digest, in ``EVERNEAR_TEST_TRAIN_IMAGE``.
"""

import multiprocessing
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from kubernetes.client import ApiClient, ApiException, BatchV1Api, CoreV1Api, V1Pod

from evernear.common.parts import PartsRecord
from evernear.common.run_record import RunRecord
from evernear.common.store import Store, open_store
from evernear.kubeflow import indexed_job
from evernear.settings.sources import IMAGE_VARIABLE
from tests.cluster.sandbox import (
    RUNNER,
    administrator,
    install_parts,
    install_store,
    kubeconfig_of,
    temporary_namespace,
    until,
)
from tests.environment import of_the_shell
from tests.releases import System
from tests.slow.kubeflow import small_steps

pytestmark = pytest.mark.cluster
KUBECONFIG, IMAGE = "KUBECONFIG", "EVERNEAR_TEST_TRAIN_IMAGE"
INDEX = "batch.kubernetes.io/job-completion-index"
JOB = "batch.kubernetes.io/job-name"
POD_START_S = 300


@dataclass(frozen=True)
class Site:
    """A namespace with the objects of `deploy/components/many-machines`."""

    namespace: str
    admin: ApiClient
    source: Store
    store: Store
    out: Path

    def ingest(self, run: str, nodes: int) -> tuple[str, dict[str, int]]:
        """Ingest the source into a dataset with the name of the run."""
        made = small_steps.ingest(run, nodes, self.source.uri, self.store.uri, self.out)
        return made.digest, made.problem_counts

    def record(self, run: str, step: str) -> PartsRecord:
        """How the parts of a step ran."""
        ran = RunRecord(self.store, run).find(f"parts_{step}", PartsRecord)
        assert ran is not None
        return ran

    def pods(self) -> list[V1Pod]:
        """The pods of all Jobs."""
        return CoreV1Api(self.admin).list_namespaced_pod(self.namespace, label_selector=JOB).items

    def jobs(self) -> set[str]:
        """The names of all Jobs."""
        return {job.metadata.name for job in BatchV1Api(self.admin).list_namespaced_job(self.namespace).items}

    def delete(self, pod: V1Pod) -> None:
        """Delete a pod as a lost node does: its object goes before its process."""
        CoreV1Api(self.admin).delete_namespaced_pod(pod.metadata.name, self.namespace, grace_period_seconds=0)

    def running_pod(self) -> V1Pod:
        """Wait for a running pod of a Job."""
        return until(lambda: next((pod for pod in self.pods() if pod.status.phase == "Running"), None), POD_START_S)


class Watch:
    """Observes which pods and Jobs exist, in a thread."""

    def __init__(self, site: Site) -> None:
        self._site, self._stop = site, threading.Event()
        self._pods = dict[str, tuple[str, int]]()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def pods_by_index(self, job: str) -> dict[int, int]:
        """The number of pods of each index of a Job."""
        return dict(Counter(index for name, index in self._pods.values() if name == job))

    def replaced(self) -> set[int]:
        """The indexes that had several pods."""
        counts = Counter(list(self._pods.values()))
        return {index for (_, index), count in counts.items() if count > 1}

    def jobs(self) -> set[str]:
        """The names of all Jobs that had pods."""
        return {name for name, _ in self._pods.values()}

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            for pod in self._site.pods():
                self._pods[pod.metadata.uid] = pod.metadata.labels[JOB], int(pod.metadata.annotations[INDEX])


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    image, kubeconfig = os.environ.get(IMAGE), of_the_shell(KUBECONFIG).get(KUBECONFIG)
    if not image or not kubeconfig:
        pytest.skip(f"needs {KUBECONFIG} and {IMAGE}")
    with administrator(Path(kubeconfig)) as admin, temporary_namespace(admin) as namespace:
        environment = install_store(admin, namespace)
        install_parts(admin, namespace, environment)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv(KUBECONFIG, str(kubeconfig_of(RUNNER, admin, namespace, tmp_path)))
        monkeypatch.setenv(IMAGE_VARIABLE, image)
        source, store = open_store("s3://evernear-images/photos"), open_store("s3://evernear/store")
        small_steps.put_photos(source, tmp_path)
        yield Site(namespace, admin, source, store, tmp_path)


def test_steps_on_nodes_give_the_results_of_one_process(site: Site, system: System) -> None:
    assert site.ingest("on-nodes", 3) == site.ingest("alone", 1)
    ran = site.record("on-nodes", "ingest")
    assert (ran.nodes, ran.parts, ran.retries) == (3, 7, 0)

    dataset = small_steps.put_system(system, site.store, site.out)
    inputs = (system, dataset, site.store, site.out)
    for run, nodes in (("on-nodes", 3), ("alone", 1)):
        small_steps.embed(run, nodes, *inputs)
    assert small_steps.embedded(site.out / "on-nodes") == small_steps.embedded(site.out / "alone")
    assert site.record("on-nodes", "embed").retries == 0
    assert site.jobs() == set()


def test_lost_pod_costs_its_part(site: Site) -> None:
    """A deleted pod may finish its parts before it stops, so pods are deleted, one of each index,
    until one had to be replaced."""
    lost, over = set[int](), threading.Event()

    def lose(seen: Watch) -> None:
        while not over.is_set() and not seen.replaced():
            for pod in site.pods():
                index = int(pod.metadata.annotations[INDEX])
                if pod.status.phase == "Running" and index not in lost:
                    lost.add(index)
                    with suppress(ApiException):  # it has ended
                        site.delete(pod)
                    break
            over.wait(0.2)

    with Watch(site) as seen:
        losing = threading.Thread(target=lose, args=(seen,))
        losing.start()
        on_nodes = site.ingest("on-nodes", 3)
        over.set()
        losing.join()
    (job,) = seen.jobs()
    pods = seen.pods_by_index(job)
    assert pods.keys() == set(range(3))
    assert seen.replaced(), "every deleted pod finished its parts first; slower parts are needed"
    assert seen.replaced() <= lost, "other workers are not run again"
    assert max(pods.values()) == 2
    assert on_nodes == site.ingest("alone", 1)


def sentence(step: Callable[[], object], capfd: pytest.CaptureFixture[str]) -> str:
    """Run a step that fails, and return its message."""
    capfd.readouterr()
    with pytest.raises(SystemExit):
        step()
    return capfd.readouterr().err.splitlines()[-1]


def test_part_that_fails_for_good_ends_the_step_with_its_sentence(
    site: Site, system: System, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = small_steps.put_system(system, site.store, site.out)
    damaged = next(shard for shard in system.dataset.manifest.shards if shard.split == "query")
    key = next(info.key for info in site.store.list("datasets/") if damaged.sha256 in info.key)
    site.store.put(key, b"damaged")
    embed = partial(small_steps.embed, "on-nodes", 3, system, dataset, site.store, site.out)
    with Watch(site) as seen:
        assert damaged.sha256 in sentence(embed, capfd)
    (job,) = seen.jobs()
    assert set(seen.pods_by_index(job).values()) == {1}, "it is not retried"
    until(lambda: not site.pods(), POD_START_S)


def test_killed_step_continues_with_its_job(site: Site) -> None:
    arguments = ("on-nodes", 2, site.source.uri, site.store.uri, site.out)
    step = multiprocessing.get_context("spawn").Process(target=small_steps.ingest, args=arguments)
    with Watch(site) as seen:
        step.start()
        site.running_pod()
        step.kill()
        step.join()
        (left,) = site.jobs()
        on_nodes = site.ingest("on-nodes", 2)
    assert seen.pods_by_index(left) == dict.fromkeys(range(2), 1), "it was adopted"
    assert len(seen.jobs()) == 2, "a file that could not be decoded is read again"
    assert site.jobs() == set()
    assert on_nodes == site.ingest("alone", 1)


def test_job_past_its_deadline_names_the_reason(
    site: Site, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = {"template": {"spec": {"nodeSelector": {"example.org/gpu": "yes"}}}}
    core = CoreV1Api(site.admin)
    core.patch_namespaced_pod_template("evernear-parts", site.namespace, template)
    with monkeypatch.context() as patch:
        patch.setattr(indexed_job, "TIMEOUT_S", 60)
        failed = sentence(lambda: site.ingest("on-nodes", 3), capfd)
    assert re.search(r"DeadlineExceeded.*FailedScheduling.*node affinity/selector", failed)
    until(lambda: not site.pods(), POD_START_S)
    core.patch_namespaced_pod_template(
        "evernear-parts", site.namespace, {"template": {"spec": {"nodeSelector": {"example.org/gpu": None}}}}
    )
    assert site.ingest("on-nodes", 3) == site.ingest("alone", 1)


def test_account_of_the_steps_has_minimal_rights(site: Site) -> None:
    with administrator(Path(os.environ[KUBECONFIG])) as runner:
        core = CoreV1Api(runner)
        for forbidden in (
            lambda: core.list_namespaced_pod(site.namespace),
            lambda: core.list_namespaced_secret(site.namespace),
            lambda: BatchV1Api(runner).list_namespaced_job(site.namespace),
            lambda: core.list_namespaced_pod_template("default"),
        ):
            with pytest.raises(ApiException) as raised:
                forbidden()
            assert raised.value.status == 403
