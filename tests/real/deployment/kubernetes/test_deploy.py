"""Deployments to a cluster end to end: the live release, the champion pointer and the messages.

The API server is the loopback one. Its Services forward to servers that answer like TorchServe with
a release.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from evernear import deployment, steps
from evernear.cli.app import app
from evernear.common.lease import Lease
from evernear.common.retry import retry
from evernear.common.store import FileStore, open_store
from evernear.deployment import kubernetes
from evernear.deployment.kubernetes import KubernetesTarget
from evernear.deployment.kubernetes.cluster import Cluster
from evernear.deployment.kubernetes.lease import KubernetesRecord
from evernear.deployment.target import Deployment
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
from evernear.release.promotions import CHAMPION, Cause
from evernear.release.registry import Registry
from evernear.settings import Settings
from tests.loopback.kubernetes import CrashLoop, ImageMissing, LoopbackCluster, Ready, labeled
from tests.loopback.kubernetes.fields import Manager
from tests.loopback.kubernetes.kinds import DEPLOYMENT
from tests.real.deployment.kubernetes.deployer import IMAGE, Answers, Known, MakeSettings, known_answers
from tests.real.serving.fake_servers import http_server
from tests.releases import MakeRelease, PackedRelease

NAME = "evernear-serving"
RELEASE = "evernear.dev/release"
SLOW = pytest.mark.slow


class Sandbox:
    """A cluster and the registry that it deploys from."""

    def __init__(
        self, loopback: LoopbackCluster, settings: Settings, releases: tuple[PackedRelease, ...], answers: list[Answers]
    ) -> None:
        self.loopback, self.releases, self.answers = loopback, releases, answers
        self.settings = settings
        self.registry = Registry(open_store(settings.store_uri))
        self.cluster = Cluster.of(settings.kubernetes.namespace)

    @property
    def champion(self) -> str | None:
        champion = self.registry.champion()
        return champion.version if champion else None

    @property
    def live(self) -> tuple[set[str], set[str]]:
        """Releases and images of all pods."""
        running = self.loopback.running_pods("evernear")
        releases = {pod["metadata"]["annotations"][RELEASE] for pod in running}
        return releases, {pod["spec"]["containers"][0]["image"] for pod in running}

    def remaining(self) -> list[str]:
        """Kinds of the remaining objects of a deployment."""
        kinds = ("ServiceAccount", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "Service", "Deployment")
        return [kind for kind in (*kinds, "HorizontalPodAutoscaler") if self.find(kind)]

    def find(self, kind: str) -> dict[str, Any] | None:
        """An object of a deployment; the deployer itself may not read every kind."""
        return self.loopback.find(kind, "evernear", NAME)

    def with_settings(self, **changes: Any) -> Settings:
        """The settings with ``changes`` in the section kubernetes."""
        chosen = self.settings.kubernetes.model_copy(update=changes)
        return self.settings.model_copy(update={"kubernetes": chosen})

    def deploy(self, release: PackedRelease, **changes: Any) -> deployment.Deployment:
        return deployment.deploy_release(release.archive, release.verdict, self.with_settings(**changes))


@pytest.fixture(scope="module")
def known(releases: tuple[PackedRelease, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Known]:
    """The answers of each release to its stored queries."""
    directory = tmp_path_factory.mktemp("opened")
    return {release.version: known_answers(release, directory) for release in releases}


@pytest.fixture
def sandbox(
    loopback: LoopbackCluster,
    make_settings: MakeSettings,
    releases: tuple[PackedRelease, ...],
    known: dict[str, Known],
) -> Iterator[Sandbox]:
    answers = [Answers(version, queries) for version, queries in known.items()]
    with ExitStack() as stack:
        for item in answers:
            port = stack.enter_context(http_server(do_POST=lambda handler, item=item: item.answer(handler)))
            loopback.set_pod_behavior(Ready(serves={8080: ("127.0.0.1", port)}), labeled(RELEASE, item.version))
        yield Sandbox(loopback, make_settings(), releases, answers)


def test_deploy_roll_back_and_promote(sandbox: Sandbox) -> None:
    first, second, _ = sandbox.releases
    deployed = sandbox.deploy(first)
    assert (deployed.version, deployed.previous, deployed.smoke_queries) == (first.version, None, 8)
    assert deployed.url == "http://evernear-serving.evernear.svc:8080/predictions/embedding"
    assert sandbox.champion == first.version
    assert sandbox.deploy(second).previous == first.version
    assert sandbox.deploy(second).previous == first.version, "a repeated deployment"
    assert sandbox.live == ({second.version}, {IMAGE})
    assert deployment.open_target(sandbox.settings).status() == {
        "server": "up",
        "url": deployed.url,
        "release": second.version,
        "ready_pods": 1,
        "image": IMAGE,
        "champion": second.version,
        "store": sandbox.settings.store_uri,
    }
    with pytest.raises(ConflictError, match="run again"):
        sandbox.deploy(first)

    back = deployment.roll_back(sandbox.settings, cause=Cause(by="ada", why="a test"))
    assert (back.version, back.previous, back.smoke_queries) == (first.version, None, 8)
    assert sandbox.live[0] == {first.version}
    assert sandbox.champion == first.version
    assert deployment.promote_release(second.version, sandbox.settings).version == second.version
    assert sandbox.live[0] == {second.version}
    assert [move.how for move in sandbox.registry.history()] == ["deploy", "deploy", "rollback", "promote"]
    assert sandbox.champion == second.version


def test_settings_are_applied_to_the_live_release(sandbox: Sandbox) -> None:
    first, second, _ = sandbox.releases
    sandbox.deploy(first)
    sandbox.deploy(second)
    image = IMAGE.replace("a" * 64, "c" * 64)
    applied = deployment.promote_release(
        second.version, sandbox.with_settings(image=image), cause=Cause(by="ada", why="a new base image")
    )
    assert (applied.version, applied.previous, applied.smoke_queries) == (second.version, first.version, 8)
    assert sandbox.live == ({second.version}, {image})
    run = "11111111-1111-1111-1111-111111111111"
    steps.promote(
        *(run, sandbox.settings.store_uri, "kubernetes"),
        {"kubernetes": sandbox.settings.kubernetes.model_dump(mode="json") | {"image": image, "replicas_min": 2}},
        *("", "", "grace"),
    )
    autoscaler = sandbox.find("HorizontalPodAutoscaler")
    assert autoscaler is not None
    assert autoscaler["spec"]["minReplicas"] == 2
    moves = [(move.how, move.by, move.run) for move in sandbox.registry.history()]
    assert moves[2:] == [("apply", "ada", ""), ("apply", "grace", run)]
    assert deployment.roll_back(sandbox.settings).version == first.version, "a rollback passes over applied settings"


def test_settings_that_fail_are_replaced_by_the_previous_ones(sandbox: Sandbox) -> None:
    sandbox.deploy(sandbox.releases[0])
    image = IMAGE.replace("a" * 64, "b" * 64)
    sandbox.loopback.set_pod_behavior(
        ImageMissing(), lambda pod: pod["spec"]["containers"][0]["image"].endswith("b" * 64)
    )
    with pytest.raises(ClusterError, match=r"cannot be pulled.* was restored and is live\.$"):
        deployment.apply(sandbox.with_settings(image=image))
    assert sandbox.live == ({sandbox.releases[0].version}, {IMAGE})
    assert [move.how for move in sandbox.registry.history()] == ["deploy"]


@pytest.mark.parametrize(
    "fault",
    ["image", "wrong answer", *(pytest.param(item, marks=SLOW) for item in ("crash", "another release", "silence"))],
)
def test_failed_release_is_replaced_by_the_previous_one(sandbox: Sandbox, fault: str) -> None:
    first, second, _ = sandbox.releases
    sandbox.deploy(first)
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
            sandbox.loopback.set_pod_behavior(CrashLoop("no"), labeled(RELEASE, second.version))
        case "image":  # the previous release is restored with its own image, not that of the settings
            changes = {"image": IMAGE.replace("a" * 64, "b" * 64)}
            sandbox.loopback.set_pod_behavior(
                ImageMissing(), lambda pod: pod["spec"]["containers"][0]["image"].endswith("b" * 64)
            )
        case "wrong answer":
            sandbox.answers[1].wrong = {"dist": 1.5}
        case "another release":
            sandbox.answers[1].wrong = {"version": "x"}
        case _:
            sandbox.loopback.set_pod_behavior(Ready(serves={8080: ("127.0.0.1", 1)}), labeled(RELEASE, second.version))
    with pytest.raises(EvernearError, match=sentence) as exc_info:
        sandbox.deploy(second, **changes)
    assert str(exc_info.value).startswith(f"Release {second.version} was not deployed: ")
    assert str(exc_info.value).endswith(f" Release {first.version} was restored and is live.")
    assert type(exc_info.value) in (ClusterError, ServingError)
    assert sandbox.champion == first.version
    assert sandbox.live == ({first.version}, {IMAGE})


@pytest.mark.parametrize("fault", [pytest.param("crash", marks=SLOW), "wrong answer"])
def test_failed_first_release_leaves_no_objects(sandbox: Sandbox, fault: str) -> None:
    if fault == "crash":
        sandbox.loopback.set_pod_behavior(CrashLoop("no"))
    else:
        sandbox.answers[0].wrong = {"pred": "?"}
    with pytest.raises(EvernearError, match=r"No release was live before it, so its objects were removed\.$"):
        sandbox.deploy(sandbox.releases[0])
    assert sandbox.remaining() == []
    assert sandbox.champion is None
    sandbox.answers[0].wrong = {}


@SLOW
def test_failed_restore_is_reported(sandbox: Sandbox) -> None:
    first, second, _ = sandbox.releases
    sandbox.deploy(first, image=IMAGE.replace("a" * 64, "c" * 64))
    sandbox.loopback.set_pod_behavior(CrashLoop("the node is broken"))
    with pytest.raises(ClusterError, match=r"was not restored: it does not come up: .*node is broken"):
        sandbox.deploy(second, rollout_timeout_s=3)
    assert sandbox.champion == first.version


def test_field_conflicts_are_reported_before_any_change(sandbox: Sandbox) -> None:
    first, second, _ = sandbox.releases
    sandbox.deploy(first)
    patch = {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 7}}}}
    editor = Manager("kubectl-edit", "Update", "apps/v1")
    sandbox.loopback.api.patch(DEPLOYMENT, patch, "evernear", NAME, manager=editor)
    with pytest.raises(
        ClusterError,
        match=r'^Deployment evernear-serving: "kubectl-edit".* set \.spec\.template\.spec\.terminationGrace\w+; '
        r"release it there, or take it over with `evernear deployment render \| kubectl apply --server-side "
        r"--field-manager=evernear --force-conflicts -f -`\.$",
    ):
        sandbox.deploy(second)
    settings = sandbox.find("ConfigMap")
    assert settings is not None
    assert settings["metadata"]["annotations"][RELEASE] == first.version
    for manifest in KubernetesTarget(sandbox.settings).render(None, warn=pytest.fail):  # what the remedy does
        sandbox.cluster.apply(manifest, force=True)
    assert sandbox.deploy(second).version == second.version


def test_owner_adds_to_the_pods(sandbox: Sandbox) -> None:
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    spec = {"tolerations": tolerations, "containers": [{"name": "torchserve", "image": "replaced"}]}
    metadata = {"name": NAME, "namespace": "evernear"}
    sandbox.loopback.create({"kind": "PodTemplate", "metadata": metadata, "template": {"spec": spec}})
    sandbox.deploy(sandbox.releases[0])
    deployed = sandbox.find("Deployment")
    assert deployed is not None
    pod = deployed["spec"]["template"]["spec"]
    assert pod["tolerations"] == tolerations
    assert [container["image"] for container in pod["containers"]] == [sandbox.settings.kubernetes.image]


class Killed(BaseException):
    """Simulates SIGKILL: no cleanup follows."""


@pytest.mark.parametrize(
    "step",
    [
        pytest.param("before the rollout", marks=SLOW),
        "before the pointer moves",
        pytest.param("before it is saved", marks=SLOW),
    ],
)
def test_killed_deployment_can_be_repeated(sandbox: Sandbox, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = sandbox.releases
    sandbox.deploy(first)

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        target = {
            "before the rollout": (kubernetes, "await_rollout"),
            "before the pointer moves": (Registry, "set_champion"),
            "before it is saved": (kubernetes, "save_last_known_good"),
        }[step]
        patched.setattr(*target, kill)
        patched.setattr(kubernetes.KubernetesTarget, "_restore_previous", kill)
        patched.setattr(Lease, "__exit__", lambda lease, *_: lease._released.set())
        with pytest.raises(Killed):
            sandbox.deploy(second)
    assert sandbox.deploy(second).version == second.version  # waits until the Lease of the killed process expires
    assert sandbox.champion == second.version
    assert sandbox.live == ({second.version}, {IMAGE})
    sandbox.loopback.set_pod_behavior(CrashLoop("no"), labeled(RELEASE, third.version))
    with pytest.raises(ClusterError, match=rf"Release {second.version} was restored and is live"):
        sandbox.deploy(third)
    assert sandbox.live == ({second.version}, {IMAGE})


@SLOW
def test_failed_release_after_a_killed_deployment_is_replaced_by_the_champion(
    sandbox: Sandbox, make_release: MakeRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release of the killed deployment never passed its smoke test, so it is not restored."""
    first, second, _ = sandbox.releases
    sandbox.deploy(first)
    rival = make_release(parent=first.version)

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(kubernetes, "verify", kill)
        patched.setattr(kubernetes.KubernetesTarget, "_restore_previous", kill)
        with pytest.raises(Killed):
            sandbox.deploy(second)
    assert sandbox.live[0] == {second.version}
    assert deployment.open_target(sandbox.settings).status()["champion"] == first.version
    sandbox.loopback.set_pod_behavior(CrashLoop("no"), labeled(RELEASE, rival.version))
    with pytest.raises(ClusterError, match=rf"Release {first.version} was restored and is live"):
        sandbox.deploy(rival)
    assert sandbox.live[0] == {first.version}


def test_one_of_two_concurrent_deployments_fails(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    in_progress, proceed = threading.Event(), threading.Event()
    verify = kubernetes.verify

    def verify_later(*arguments: Any) -> int:
        in_progress.set()
        assert proceed.wait(60)
        return verify(*arguments)

    monkeypatch.setattr(kubernetes, "verify", verify_later)
    first = threading.Thread(target=sandbox.deploy, args=(sandbox.releases[0],))
    first.start()
    assert in_progress.wait(60)
    with pytest.raises(BusyError, match="is in progress, by "):
        sandbox.deploy(sandbox.releases[0])
    proceed.set()
    first.join()
    assert sandbox.champion == sandbox.releases[0].version


def test_champion_changed_during_a_deployment_stays_live(
    sandbox: Sandbox, make_release: MakeRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = sandbox.releases
    sandbox.deploy(first)
    rival = make_release(parent=first.version)
    verify = kubernetes.verify

    def verify_and_lose(*arguments: Any) -> int:
        sandbox.registry.publish(rival.archive)
        sandbox.registry.set_champion(rival.version, sandbox.registry.champion())
        return verify(*arguments)

    monkeypatch.setattr(kubernetes, "verify", verify_and_lose)
    with pytest.raises(
        ConflictError, match=rf"champion changed in the meantime.* Release {rival.version} was restored"
    ):
        sandbox.deploy(second)
    assert sandbox.champion == rival.version
    assert sandbox.live[0] == {rival.version}


def fail_to_record(
    error: EvernearError,
    monkeypatch: pytest.MonkeyPatch,
    executed: bool = False,
) -> None:
    """Make one write of the champion pointer fail, before or after it takes effect."""
    put_if, remaining = FileStore.put_if, iter([1])

    def fail(store: FileStore, key: str, data: bytes, etag: str | None) -> str:
        if key != CHAMPION or next(remaining, None) is None:
            return put_if(store, key, data, etag)
        if executed:
            put_if(store, key, data, etag)
        raise error

    monkeypatch.setattr(FileStore, "put_if", fail)


@pytest.mark.parametrize("executed", [False, True], ids=["not carried out", "carried out"])
def test_release_that_passed_its_smoke_test_stays_live_if_the_store_is_unreachable(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, executed: bool
) -> None:
    first, second, _ = sandbox.releases
    sandbox.deploy(first)
    with monkeypatch.context() as patched:
        fail_to_record(TransientStoreError("http://s3 cannot be reached."), patched, executed=executed)
        with pytest.raises(
            TransientStoreError,
            match=rf"^Release {second.version} answered its stored queries and stays in place, but it may not be "
            rf"recorded as the champion: http://s3 cannot be reached\. .*`evernear registry promote {second.version}`",
        ):
            sandbox.deploy(second)
    assert sandbox.live == ({second.version}, {IMAGE})
    assert sandbox.champion == (second.version if executed else first.version)
    if executed:
        sandbox.deploy(second)
    else:
        deployment.promote_release(second.version, sandbox.settings)
    assert sandbox.live == ({second.version}, {IMAGE})
    assert [move.version for move in sandbox.registry.history()] == [first.version, second.version]
    assert deployment.roll_back(sandbox.settings).version == first.version


@pytest.mark.slow
@pytest.mark.parametrize("how", ["deploy", "promote", "apply", "rollback"])
def test_step_that_runs_again_does_not_act_twice(sandbox: Sandbox, how: str) -> None:
    """Argo runs a step again after a lost node, even if its first attempt has moved the
    champion."""
    first, second, third = sandbox.releases
    sandbox.deploy(first)
    if how in ("apply", "rollback"):
        sandbox.deploy(second)
    if how == "rollback":
        sandbox.deploy(third)
    sandbox.registry.publish(second.archive)
    cause = Cause.of_run("run-1", "someone", "a reason")
    steps: dict[str, Callable[[], Deployment]] = {
        "deploy": lambda: deployment.deploy_release(second.archive, second.verdict, sandbox.settings, cause),
        "promote": lambda: deployment.promote_release(second.version, sandbox.settings, force=True, cause=cause),
        "apply": lambda: deployment.apply(sandbox.settings, cause=cause),
        "rollback": lambda: deployment.roll_back(sandbox.settings, cause=cause, expected=None),
    }
    assert steps[how]() == steps[how]()
    assert sandbox.champion == second.version
    assert sandbox.live == ({second.version}, {IMAGE})
    moves = [move.run for move in sandbox.registry.history()]
    assert moves.count("run-1") == 1
    assert moves[-1] == "run-1"
    deployment.roll_back(sandbox.settings)
    with pytest.raises(ConflictError, match=rf"already made release {second.version} the champion, .* nothing was"):
        steps[how]()
    assert [move.run for move in sandbox.registry.history()] == [*moves, ""]


def test_previous_release_is_restored_if_the_store_denies_access(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = sandbox.releases
    sandbox.deploy(first)
    fail_to_record(StoreError("s3:PutObject is not permitted."), monkeypatch)
    with pytest.raises(StoreError, match=rf"is not permitted\. Release {first.version} was restored and is live"):
        sandbox.deploy(second)
    assert sandbox.champion == first.version
    assert sandbox.live == ({first.version}, {IMAGE})


@SLOW
def test_lost_lease_stops_the_deployment(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.deploy(sandbox.releases[0])
    verify = kubernetes.verify

    def take_lease() -> None:
        manifest = sandbox.cluster.get("Lease", NAME)
        assert manifest is not None
        sandbox.cluster.replace(manifest | {"spec": {**manifest["spec"], "holderIdentity": "somebody else"}})

    def verify_and_lose(*arguments: Any) -> int:
        retry(take_lease, on=ClusterError, pauses_s=[0.01] * 100)  # its holder renews it meanwhile
        threading.Event().wait(kubernetes.LEASE_S)
        return verify(*arguments)

    monkeypatch.setattr(kubernetes, "verify", verify_and_lose)
    with pytest.raises(BusyError, match=r"lost the Lease evernear-serving .*The previous release was not restored"):
        sandbox.deploy(sandbox.releases[1])
    assert sandbox.champion == sandbox.releases[0].version


def test_rejected_deployment_changes_nothing(
    sandbox: Sandbox, make_release: MakeRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_back = make_release(promote=False)
    with pytest.raises(IntegrityError, match=r"The verdict on release \S+ is hold"):
        sandbox.deploy(held_back)
    with pytest.raises(SettingsError, match="needs the serving image by its digest"):
        sandbox.deploy(sandbox.releases[0], image="")
    with pytest.raises(SettingsError, match="The API server does not forward a token"):
        sandbox.deploy(sandbox.releases[0], token_secret="token")
    with pytest.raises(SettingsError, match="The API server does not forward a token"):
        deployment.open_target(sandbox.with_settings(token_secret="token")).require_deployable()
    with pytest.raises(StoreError, match="No release has been promoted"):
        deployment.apply(sandbox.settings)
    assert {
        call.verb for call in sandbox.loopback.calls if call.name == NAME and call.query.get("dryRun") != "All"
    } <= {
        "get",
        "update",
    }
    assert sandbox.remaining() == []
    monkeypatch.setenv("KUBECONFIG", str(sandbox.loopback.kubeconfig("evernear/stranger", namespace="evernear")))
    with pytest.raises(ClusterError, match=r'cannot get resource "leases".*docs/kubernetes\.md has the Role'):
        sandbox.deploy(sandbox.releases[0])


def test_status_and_render_show_the_live_release_and_the_manifests_even_without_a_cluster(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sandbox.deploy(sandbox.releases[0])
    flags = [
        f"--set={key}={value}"
        for key, value in {
            "store": sandbox.settings.store_uri,
            "target": "kubernetes",
            "kubernetes.image": IMAGE,
            "kubernetes.store_claim": "store",
            "kubernetes.replicas_min": 1,
        }.items()
    ]
    status = CliRunner().invoke(app, ["status", "--workdir", str(tmp_path), *flags])
    assert ["release", sandbox.releases[0].version] in [line.split() for line in status.output.splitlines()]
    rendered = CliRunner().invoke(app, ["deployment", "render", *flags])
    assert rendered.output.count("\nkind: ") == 7, rendered.output
    assert f"evernear.dev/release: {sandbox.releases[0].version}" in rendered.output
    assert "&id" not in rendered.output
    with Lease(KubernetesRecord(sandbox.cluster, NAME, 5)):
        busy = CliRunner().invoke(app, ["registry", "rollback", *flags])
    assert "nothing to roll back to" in str(busy.exception)
    target, warned = KubernetesTarget(sandbox.settings), list[str]()
    expected = target.render(None, warn=pytest.fail)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    assert KubernetesTarget(sandbox.settings).render(None, warn=warned.append) == expected
    (sentence,) = warned
    assert sentence.startswith("Rendered without the additions of a PodTemplate evernear-serving: ")
