"""Deployments to a cluster from beginning to end: what serves, where the champion's pointer stands, what is said.

The API server is the loopback one; behind its Services stand servers that answer as TorchServe does with a release.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import IMAGE, MakeSettings
from kubernetes import client, config
from loopback.kubernetes import CrashLoop, ImageMissing, LoopbackCluster, Ready, carries
from releases import MakeRelease, PackedRelease
from serving.stand_ins import http_server
from typer.testing import CliRunner

from evernear import deployment
from evernear.cli import app
from evernear.deployment import kubernetes
from evernear.deployment.kubernetes import rollout
from evernear.deployment.kubernetes.cluster import Cluster
from evernear.deployment.kubernetes.lease import LeaseLock
from evernear.errors import (
    BusyError,
    ClusterError,
    ConflictError,
    EvernearError,
    IntegrityError,
    ServingError,
    SettingsError,
    StoreError,
    TransientStoreError,
)
from evernear.release import registry
from evernear.release.archive_reader import open_release
from evernear.release.registry import CHAMPION, Cause, Registry
from evernear.settings import Settings
from evernear.store import FileStore, open_store

NAME = "evernear-serving"
RELEASE = "evernear.dev/release"
SLOW = pytest.mark.slow


class Answers:
    """What TorchServe answers with one release in it; ``wrong`` spoils it."""

    def __init__(self, release: PackedRelease, directory: Path) -> None:
        parts = open_release(release.archive, directory)
        self.version = release.version
        self.known = {
            image: {"pred": query.pred, "dist": query.dist, "unknown": query.unknown}
            for image, query in parts.smoke_queries()
        }
        self.wrong: dict[str, Any] = {}

    def answer(self, handler: Any) -> None:
        image = handler.rfile.read(int(handler.headers["Content-Length"]))
        asked = handler.path.removeprefix("/predictions/embedding").strip("/") or self.version
        if asked != self.version:
            told = {
                "code": 404,
                "type": "ModelVersionNotFoundException",
                "message": f"There is no {asked}.",
            }
        elif self.known.get(image) is None:
            told = {"code": 400, "type": "BadImage", "message": "No image of this release."}
        else:
            told = self.known[image] | {"neighbors": [], "version": self.version} | self.wrong
        body = json.dumps(told).encode()
        handler.send_response(told.get("code", 200))
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


class Site:
    """A cluster, a registry, and servers for the releases."""

    def __init__(self, loopback: LoopbackCluster, settings: Settings) -> None:
        self.loopback = loopback
        self.settings = settings
        self.registry = Registry(open_store(settings.store_uri))
        self.cluster = Cluster.of(settings.kubernetes)
        self._admin = config.new_client_from_config(str(loopback.kubeconfig()))

    @property
    def champion(self) -> str | None:
        champion = self.registry.champion()
        return champion.version if champion else None

    @property
    def serves(self) -> tuple[set[str], set[str]]:
        """The releases and the images of all pods."""
        pods = client.CoreV1Api(self._admin).list_namespaced_pod("evernear").items
        alive = [pod for pod in pods if not pod.metadata.deletion_timestamp]
        return {pod.metadata.annotations[RELEASE] for pod in alive}, {pod.spec.containers[0].image for pod in alive}

    def left(self) -> list[str]:
        """Kinds of all that a deployment made and that is still there."""
        kinds = ("ServiceAccount", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "Service", "Deployment")
        admin = Cluster(self._admin, "evernear", inside=False)
        return [kind for kind in (*kinds, "HorizontalPodAutoscaler") if admin.get(kind, NAME)]

    def deploy(self, release: PackedRelease, **changes: Any) -> deployment.Deployment:
        chosen = self.settings.kubernetes.model_copy(update=changes)
        return deployment.deploy(
            release.archive, release.verdict, self.settings.model_copy(update={"kubernetes": chosen})
        )


@pytest.fixture(scope="module")
def releases(make_release: MakeRelease) -> tuple[PackedRelease, PackedRelease, PackedRelease]:
    """One after the other."""
    first = make_release()
    second = make_release(parent=first.version)
    return first, second, make_release(parent=second.version)


@pytest.fixture
def answers(releases: tuple[PackedRelease, ...], tmp_path: Path) -> list[Answers]:
    return [Answers(release, tmp_path / f"opened-{number}") for number, release in enumerate(releases)]


@pytest.fixture
def site(
    loopback: LoopbackCluster, make_settings: MakeSettings, answers: list[Answers], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    monkeypatch.setattr(rollout, "DIAGNOSIS_INTERVAL_S", 1)
    with ExitStack() as stack:
        for each in answers:
            port = stack.enter_context(http_server(do_POST=lambda handler, each=each: each.answer(handler)))
            loopback.pods_do(Ready(serves={8080: ("127.0.0.1", port)}), carries(RELEASE, each.version))
        yield Site(loopback, make_settings())


def test_releases_follow_each_other_and_go_back(site: Site, releases: tuple[PackedRelease, ...]) -> None:
    first, second, _ = releases
    deployed = site.deploy(first)
    assert (deployed.version, deployed.previous, deployed.smoke_queries) == (first.version, None, 8)
    assert deployed.url == "http://evernear-serving.evernear.svc:8080/predictions/embedding"
    assert site.champion == first.version
    assert site.deploy(second).previous == first.version
    assert site.deploy(second).previous == first.version, "the same step again"
    assert site.serves == ({second.version}, {IMAGE})
    assert deployment.status(site.settings) == {
        "server": "up",
        "url": deployed.url,
        "release": second.version,
        "ready_pods": 1,
        "image": IMAGE,
        "champion": second.version,
        "store": site.settings.store_uri,
    }
    with pytest.raises(ConflictError, match="run again"):
        site.deploy(first)

    back = deployment.roll_back(site.settings, cause=Cause(by="ada", why="a test"))
    assert (back.version, back.previous, back.smoke_queries) == (first.version, None, 8)
    assert site.serves[0] == {first.version}
    assert site.champion == first.version
    assert deployment.promote(second.version, site.settings).version == second.version
    assert site.serves[0] == {second.version}
    assert [move.how for move in site.registry.history()] == ["deploy", "deploy", "rollback", "promote"]
    assert site.champion == second.version


def test_what_is_applied_tells_its_release_and_is_ours(site: Site, releases: tuple[PackedRelease, ...]) -> None:
    site.deploy(releases[0])
    patches = [call for call in site.loopback.calls if call.verb == "patch"]
    assert {call.query["fieldManager"] for call in patches} == {"evernear"}
    assert {call.query.get("force") for call in patches if call.name == NAME} == {"false"}
    found = site.cluster.get("Deployment", NAME)
    assert found is not None
    record = site.registry.get(releases[0].version)
    assert found["metadata"]["annotations"]["evernear.dev/archive-sha256"] == record.archive_sha256
    assert found["metadata"]["labels"]["app.kubernetes.io/version"] == record.manifest.version


@pytest.mark.parametrize(
    "fault",
    ["image", "wrong answer", *(pytest.param(each, marks=SLOW) for each in ("crash", "another release", "silence"))],
)
def test_a_release_that_fails_leaves_the_one_before_it(
    site: Site, releases: tuple[PackedRelease, ...], answers: list[Answers], fault: str
) -> None:
    first, second, _ = releases
    site.deploy(first)
    sentence = {
        "crash": "container torchserve of pod",
        "image": "cannot be pulled",
        "wrong answer": "fails its smoke test: smoke-00.png",
        "another release": f"does not answer with release {second.version} alone after 1 s: it answers with release x",
        "silence": "does not answer with release .* alone after 1 s: .*cannot|does not answer|fails|error trying",
    }[fault]
    changes: dict[str, Any] = {}
    match fault:
        case "crash":
            site.loopback.pods_do(CrashLoop("no"), carries(RELEASE, second.version))
        case "image":  # and what is put back has its own, not that of the settings
            changes = {"image": IMAGE.replace("a" * 64, "b" * 64)}
            site.loopback.pods_do(ImageMissing(), lambda pod: pod["spec"]["containers"][0]["image"].endswith("b" * 64))
        case "wrong answer":
            answers[1].wrong = {"dist": 1.5}
        case "another release":
            answers[1].wrong = {"version": "x"}
        case _:
            site.loopback.pods_do(Ready(serves={8080: ("127.0.0.1", 1)}), carries(RELEASE, second.version))
    with pytest.raises(EvernearError, match=sentence) as caught:
        site.deploy(second, **changes)
    assert str(caught.value).startswith(f"Release {second.version} was not deployed: ")
    assert str(caught.value).endswith(f" Release {first.version} was put back and serves.")
    assert type(caught.value) in (ClusterError, ServingError)
    assert site.champion == first.version
    assert site.serves == ({first.version}, {IMAGE})


@pytest.mark.parametrize("fault", [pytest.param("crash", marks=SLOW), "wrong answer"])
def test_a_first_release_that_fails_leaves_nothing(
    site: Site, releases: tuple[PackedRelease, ...], answers: list[Answers], fault: str
) -> None:
    if fault == "crash":
        site.loopback.pods_do(CrashLoop("no"))
    else:
        answers[0].wrong = {"pred": "?"}
    with pytest.raises(EvernearError, match=r"Nothing served before it, so all that was made for it was removed\.$"):
        site.deploy(releases[0])
    assert site.left() == []
    assert site.champion is None
    answers[0].wrong = {}


@SLOW
def test_what_could_not_be_put_back_is_said(site: Site, releases: tuple[PackedRelease, ...]) -> None:
    first, second, _ = releases
    site.deploy(first, image=IMAGE.replace("a" * 64, "c" * 64))
    site.loopback.pods_do(CrashLoop("the node is broken"))
    with pytest.raises(ClusterError, match=r"was not put back: it does not come up: .*node is broken"):
        site.deploy(second, rollout_timeout_s=3)
    assert site.champion == first.version


def test_somebody_elses_fields_are_named_before_anything_changes(
    site: Site, releases: tuple[PackedRelease, ...]
) -> None:
    first, second, _ = releases
    site.deploy(first)
    apps = client.AppsV1Api(config.new_client_from_config(str(site.loopback.kubeconfig())))
    patch = {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 7}}}}
    apps.patch_namespaced_deployment(NAME, "evernear", patch, field_manager="kubectl-edit")
    with pytest.raises(
        ClusterError,
        match=r'^Deployment evernear-serving: "kubectl-edit".* set \.spec\.template\.spec\.terminationGrace\w+; '
        r"let go of that there, or take it with --set kubernetes\.force_conflicts=true\.$",
    ):
        site.deploy(second)
    settings = client.CoreV1Api(apps.api_client).read_namespaced_config_map(NAME, "evernear")
    assert settings.metadata.annotations[RELEASE] == first.version
    assert site.deploy(second, force_conflicts=True).version == second.version


class Killed(BaseException):
    """SIGKILL: nothing that the process would do afterwards is done."""


@pytest.mark.parametrize(
    "when",
    [
        pytest.param("before the rollout", marks=SLOW),
        "before the pointer moves",
        pytest.param("before it is remembered", marks=SLOW),
    ],
)
def test_a_deployment_that_was_killed_is_run_again(
    site: Site, releases: tuple[PackedRelease, ...], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = releases
    site.deploy(first)

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        where = {
            "before the rollout": (kubernetes, "await_rollout"),
            "before the pointer moves": (Registry, "set_champion"),
            "before it is remembered": (kubernetes, "save_last_known_good"),
        }[when]
        patched.setattr(*where, kill)
        patched.setattr(kubernetes.KubernetesTarget, "_put_back", kill)
        patched.setattr(kubernetes.LeaseLock, "release", lambda lease: lease._released.set())
        with pytest.raises(Killed):
            site.deploy(second)
    assert site.deploy(second).version == second.version  # waits for the dead one's Lease
    assert site.champion == second.version
    assert site.serves == ({second.version}, {IMAGE})
    site.loopback.pods_do(CrashLoop("no"), carries(RELEASE, third.version))
    with pytest.raises(ClusterError, match=rf"Release {second.version} was put back and serves"):
        site.deploy(third)
    assert site.serves == ({second.version}, {IMAGE})


@SLOW
def test_after_a_kill_another_release_may_come(
    site: Site, releases: tuple[PackedRelease, ...], make_release: MakeRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was killed is never proved; what fails after it is replaced by the champion, not by that."""
    first, second, _ = releases
    site.deploy(first)
    rival = make_release(parent=first.version)

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(kubernetes, "prove", kill)
        patched.setattr(kubernetes.KubernetesTarget, "_put_back", kill)
        with pytest.raises(Killed):
            site.deploy(second)
    assert site.serves[0] == {second.version}
    assert deployment.status(site.settings)["champion"] == first.version
    site.loopback.pods_do(CrashLoop("no"), carries(RELEASE, rival.version))
    with pytest.raises(ClusterError, match=rf"Release {first.version} was put back and serves"):
        site.deploy(rival)
    assert site.serves[0] == {first.version}


def test_of_two_deployments_at_once_one_goes_on(
    site: Site, releases: tuple[PackedRelease, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, go_on = threading.Event(), threading.Event()
    real = kubernetes.prove

    def prove_later(*arguments: Any) -> int:
        under_way.set()
        assert go_on.wait(60)
        return real(*arguments)

    monkeypatch.setattr(kubernetes, "prove", prove_later)
    first = threading.Thread(target=site.deploy, args=(releases[0],))
    first.start()
    assert under_way.wait(60)
    with pytest.raises(BusyError, match="is under way, by "):
        site.deploy(releases[0])
    go_on.set()
    first.join()
    assert site.champion == releases[0].version


def test_a_champion_that_moves_meanwhile_stays(
    site: Site, releases: tuple[PackedRelease, ...], make_release: MakeRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = releases
    site.deploy(first)
    rival = make_release(parent=first.version)
    real = kubernetes.prove

    def prove_and_lose(*arguments: Any) -> int:
        site.registry.publish(rival.archive)
        site.registry.set_champion(rival.version, site.registry.champion())
        return real(*arguments)

    monkeypatch.setattr(kubernetes, "prove", prove_and_lose)
    with pytest.raises(ConflictError, match=rf"champion changed meanwhile.* Release {rival.version} was put back"):
        site.deploy(second)
    assert site.champion == rival.version
    assert site.serves[0] == {rival.version}


def fail_to_record(
    error: EvernearError,
    monkeypatch: pytest.MonkeyPatch,
    times: int = 1,
    patience_s: float = 0.0,
    executed: bool = False,
) -> Iterator[int]:
    """Let the store fail when the champion's pointer is written, before that is carried out or after; what is left."""
    put_if, left = FileStore.put_if, iter(range(times))

    def fail(store: FileStore, key: str, data: bytes, etag: str | None) -> str:
        if key != CHAMPION or next(left, None) is None:
            return put_if(store, key, data, etag)
        if executed:
            put_if(store, key, data, etag)
        raise error

    monkeypatch.setattr(FileStore, "put_if", fail)
    monkeypatch.setattr(registry, "_PATIENCE_S", patience_s)
    monkeypatch.setattr(registry, "_PAUSE_S", (0.01, 0.01))
    return left


@pytest.mark.parametrize("executed", [False, True], ids=["not carried out", "carried out"])
def test_a_proved_release_stays_where_the_store_cannot_be_reached_to_record_it(
    site: Site, releases: tuple[PackedRelease, ...], monkeypatch: pytest.MonkeyPatch, executed: bool
) -> None:
    first, second, _ = releases
    site.deploy(first)
    with monkeypatch.context() as patched:
        fail_to_record(TransientStoreError("http://s3 cannot be reached."), patched, executed=executed)
        with pytest.raises(
            TransientStoreError,
            match=rf"^Release {second.version} answered its stored queries and stays in place, but it may not be "
            rf"recorded as the champion: http://s3 cannot be reached\. .*`evernear registry promote {second.version}`",
        ):
            site.deploy(second)
    assert site.serves == ({second.version}, {IMAGE})
    assert site.champion == (second.version if executed else first.version)
    if executed:
        site.deploy(second)
    else:
        deployment.promote(second.version, site.settings)
    assert site.serves == ({second.version}, {IMAGE})
    assert [move.version for move in site.registry.history()] == [first.version, second.version]
    assert deployment.roll_back(site.settings).version == first.version


def test_a_rollback_waits_for_the_store_and_is_not_taken_back(
    site: Site, releases: tuple[PackedRelease, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = releases
    site.deploy(first)
    site.deploy(second)
    with monkeypatch.context() as patched:
        left = fail_to_record(TransientStoreError("http://s3 cannot be reached."), patched, times=3, patience_s=60.0)
        assert deployment.roll_back(site.settings).version == first.version
    assert list(left) == []
    assert site.champion == first.version
    assert site.serves == ({first.version}, {IMAGE})
    assert [move.how for move in site.registry.history()] == ["deploy", "deploy", "rollback"]


def test_a_store_that_refuses_brings_the_release_before_back(
    site: Site, releases: tuple[PackedRelease, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = releases
    site.deploy(first)
    fail_to_record(StoreError("s3:PutObject is not permitted."), monkeypatch)
    with pytest.raises(StoreError, match=rf"is not permitted\. Release {first.version} was put back and serves"):
        site.deploy(second)
    assert site.champion == first.version
    assert site.serves == ({first.version}, {IMAGE})


@SLOW
def test_a_lease_that_is_lost_stops_the_deployment(
    site: Site, releases: tuple[PackedRelease, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.deploy(releases[0])
    real = kubernetes.prove

    def prove_and_lose(*arguments: Any) -> int:
        found = site.cluster.get("Lease", NAME)
        assert found is not None
        site.cluster.replace(found | {"spec": {**found["spec"], "holderIdentity": "somebody else"}})
        threading.Event().wait(site.settings.kubernetes.lease_s)
        return real(*arguments)

    monkeypatch.setattr(kubernetes, "prove", prove_and_lose)
    with pytest.raises(BusyError, match=r"lost the Lease evernear-serving .*What served before was not put back"):
        site.deploy(releases[1])
    assert site.champion == releases[0].version


def test_nothing_is_touched_for_a_release_that_may_not_serve(
    site: Site, releases: tuple[PackedRelease, ...], make_release: MakeRelease, tmp_path: Path
) -> None:
    held_back = make_release(promote=False)
    with pytest.raises(IntegrityError, match="The verdict holds release"):
        site.deploy(held_back)
    with pytest.raises(SettingsError, match="needs the serving image by its digest"):
        site.deploy(releases[0], image="")
    with pytest.raises(SettingsError, match="The API server passes no token on"):
        site.deploy(releases[0], token_secret="token")
    assert {call.verb for call in site.loopback.calls if call.name == NAME and call.query.get("dryRun") != "All"} <= {
        "get",
        "update",
    }
    assert site.left() == []


def test_a_deployer_without_rights_is_told_which(
    site: Site, releases: tuple[PackedRelease, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(site.loopback.kubeconfig("evernear/stranger", namespace="evernear")))
    with pytest.raises(ClusterError, match=r'cannot get resource "leases".*docs/kubernetes\.md has the Role'):
        site.deploy(releases[0])


def test_the_command_line_tells_what_serves_and_what_would(
    site: Site, releases: tuple[PackedRelease, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.deploy(releases[0])
    flags = [
        f"--set={key}={value}"
        for key, value in {
            "store": site.settings.store_uri,
            "target": "kubernetes",
            "kubernetes.image": IMAGE,
            "kubernetes.store_claim": "store",
            "kubernetes.lease_s": 2,
            "kubernetes.convergence_timeout_s": 1,
            "kubernetes.failure_grace_s": 1,
            "kubernetes.replicas_min": 1,
        }.items()
    ]
    told = CliRunner().invoke(app, ["status", *flags])
    assert f"release      {releases[0].version}" in told.output
    rendered = CliRunner().invoke(app, ["deployment", "render", *flags])
    assert rendered.output.count("\nkind: ") == 7, rendered.output
    assert f"evernear.dev/release: {releases[0].version}" in rendered.output
    assert "&id" not in rendered.output
    with LeaseLock(site.cluster, NAME, 5):
        busy = CliRunner().invoke(app, ["registry", "rollback", *flags])
    assert "nothing to roll back to" in str(busy.exception)
