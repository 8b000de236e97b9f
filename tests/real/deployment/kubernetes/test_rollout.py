"""A rollout is followed until it completes, or fails with one sentence that names the cause."""

import threading

import pytest

from evernear.deployment.kubernetes.cluster import VERSION, Cluster
from evernear.deployment.kubernetes.objects import serving_objects
from evernear.deployment.kubernetes.pod_template import ServedRelease
from evernear.deployment.kubernetes.revision import apply_revision
from evernear.deployment.kubernetes.rollout import await_rollout
from evernear.errors import ClusterError
from evernear.settings import Settings
from tests.loopback.kubernetes import (
    CrashLoop,
    ImageMissing,
    LoopbackCluster,
    NotReady,
    PodBehavior,
    Ready,
    Stuck,
    Unschedulable,
    internal_error,
    labeled,
    too_many_requests,
)
from tests.loopback.kubernetes.controller_base import is_ready
from tests.loopback.kubernetes.kinds import DEPLOYMENT
from tests.real.deployment.kubernetes.deployer import MakeSettings
from tests.waiting import until

OLD, NEW = "20260101.000000.00000000", "20260102.000000.00000000"


def roll_out(settings: Settings, version: str) -> None:
    cluster = Cluster.of(settings.kubernetes.namespace)
    apply_revision(cluster, serving_objects(settings, ServedRelease(version, "b" * 64, "c" * 64)))
    await_rollout(cluster, settings.kubernetes)


def served(loopback: LoopbackCluster) -> set[str]:
    """Releases of the ready pods."""
    return {pod["metadata"]["labels"][VERSION] for pod in loopback.running_pods("evernear") if is_ready(pod)}


def test_rollout_completes_when_all_pods_are_new_and_ready(
    loopback: LoopbackCluster, make_settings: MakeSettings
) -> None:
    settings = make_settings(replicas_min=2)
    roll_out(settings, OLD)
    assert served(loopback) == {OLD}
    loopback.set_pod_behavior(Ready(after_s=0.3))
    roll_out(settings, NEW)
    assert served(loopback) == {NEW}
    roll_out(settings, NEW)  # no change


def test_deployment_scaled_to_zero_fails(loopback: LoopbackCluster, make_settings: MakeSettings) -> None:
    settings = make_settings()
    roll_out(settings, OLD)
    loopback.api.patch(DEPLOYMENT, {"spec": {"replicas": 0}}, "evernear", "evernear-serving")
    with pytest.raises(ClusterError, match="was scaled to 0 replicas"):
        roll_out(settings, NEW)


@pytest.mark.parametrize(
    ("behavior", "sentence"),
    [
        (
            ImageMissing("manifest unknown"),
            r"the image registry\.example/evernear-serve@sha256:a+ cannot be pulled: .*"
            r"manifest unknown",
        ),
        (
            CrashLoop("line 1\nline 2\nTraceback\nOSError: no Java\n"),
            r"container torchserve of pod \S+ keeps "
            r"crashing \(exit code 1\); its log ends with 'line 2 / Traceback / OSError: no Java'",
        ),
        (
            CrashLoop("killed\n", exit_code=137, reason="OOMKilled"),
            r".*\(it needs more memory than its limit; raise kubernetes",
        ),
        (
            CrashLoop("evernear: Release x does not exist\n", container="fetch"),
            r"init container fetch of pod \S+ keeps "
            r"crashing \(exit code 1\); its log ends with 'evernear: Release x does not exist'",
        ),
    ],
)
def test_persistent_failure_ends_the_rollout_early(
    loopback: LoopbackCluster, make_settings: MakeSettings, behavior: PodBehavior, sentence: str
) -> None:
    settings = make_settings()
    roll_out(settings, OLD)
    loopback.set_pod_behavior(behavior, labeled(VERSION, NEW))
    with pytest.raises(ClusterError, match=f"^it does not come up: {sentence}"):  # after its timeout: is not up after
        roll_out(settings, NEW)
    assert served(loopback) == {OLD}


@pytest.mark.parametrize(
    ("behavior", "sentence"),
    [
        (Unschedulable(), r"pod \S+ cannot be scheduled: 0/1 nodes are available: 1 Insufficient cpu"),
        (
            NotReady("Readiness probe failed: HTTP probe failed with statuscode: 503"),
            r"the (readiness|startup) probe of "
            r"pod \S+ fails: Readiness probe failed: HTTP probe failed with statuscode: 503",
        ),
        pytest.param(Stuck(), "the cause is unknown", marks=pytest.mark.slow),
    ],
)
def test_transient_failure_is_awaited_until_the_timeout(
    loopback: LoopbackCluster, make_settings: MakeSettings, behavior: PodBehavior, sentence: str
) -> None:
    settings = make_settings(rollout_timeout_s=2)
    roll_out(settings, OLD)
    loopback.set_pod_behavior(behavior, labeled(VERSION, NEW))
    with pytest.raises(ClusterError, match=rf"^it is not up after 2 s: {sentence}"):
        roll_out(settings, NEW)
    loopback.set_pod_behavior(Ready())
    roll_out(settings, NEW)
    assert served(loopback) == {NEW}


@pytest.mark.parametrize("second_s", [0.001])
def test_stale_progress_deadline_is_ignored(loopback: LoopbackCluster, make_settings: MakeSettings) -> None:
    """The deployment is repeated once its missing resource exists; the condition of the first
    attempt remains."""
    settings = make_settings()
    cluster = Cluster.of(settings.kubernetes.namespace)
    loopback.set_pod_behavior(Unschedulable())
    apply_revision(cluster, serving_objects(settings, ServedRelease(NEW, "b" * 64, "c" * 64)))
    until(lambda: "ProgressDeadlineExceeded" in str(cluster.get("Deployment", settings.kubernetes.name)))
    loopback.set_pod_behavior(Ready(after_s=0.5))
    roll_out(settings, NEW)
    assert served(loopback) == {NEW}


def test_missing_volume_is_named(loopback: LoopbackCluster, make_settings: MakeSettings) -> None:
    settings = make_settings(rollout_timeout_s=2, token_secret="forgotten")
    with pytest.raises(ClusterError, match=r'pod \S+ does not start: .*secret "forgotten" not found'):
        roll_out(settings, NEW)


def test_rejected_pods_are_reported(loopback: LoopbackCluster, make_settings: MakeSettings) -> None:
    """Pod Security rejects them here; an exhausted quota sets the same condition."""
    settings = make_settings(rollout_timeout_s=2)
    objects = serving_objects(settings, ServedRelease(NEW, "b" * 64, "c" * 64))
    for manifest in objects:
        if manifest["kind"] == "Deployment":
            manifest["spec"]["template"]["spec"]["hostNetwork"] = True
    cluster = Cluster.of(settings.kubernetes.namespace)
    apply_revision(cluster, objects)
    with pytest.raises(ClusterError, match=r"no pod can be created: .*violates PodSecurity"):
        await_rollout(cluster, settings.kubernetes)


def test_deployment_deleted_during_the_rollout_is_reported(
    loopback: LoopbackCluster, make_settings: MakeSettings
) -> None:
    loopback.set_pod_behavior(Stuck())
    timer = threading.Timer(0.5, loopback.api.delete, [DEPLOYMENT, "evernear", "evernear-serving"])
    timer.start()
    with pytest.raises(ClusterError, match="the Deployment evernear-serving was deleted"):
        roll_out(make_settings(), NEW)
    timer.join()


@pytest.mark.parametrize(
    "fault",
    [
        "dropped watches",
        "expired versions",
        "away",
        *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("429", "500", "dropped answers")),
    ],
)
def test_rollout_survives_a_faulty_api_server(
    loopback: LoopbackCluster, make_settings: MakeSettings, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evernear.deployment.kubernetes.cluster.BACKOFF_S", 0.05)
    settings = make_settings()
    loopback.set_pod_behavior(Ready(after_s=1.0))
    match fault:
        case "dropped watches" | "expired versions":
            disrupt = loopback.drop_watches if fault == "dropped watches" else loopback.expire
            timers = [threading.Timer(0.2 * step, disrupt) for step in range(8)]
            for timer in timers:
                timer.start()
            roll_out(settings, NEW)
            for timer in timers:
                timer.cancel()
                timer.join()
        case "429":
            loopback.fail(too_many_requests(), times=3)
            roll_out(settings, NEW)
        case "500":
            loopback.fail(internal_error(), lambda call: call.verb == "get", times=3)
            roll_out(settings, NEW)
        case "dropped answers":
            loopback.drop(lambda call: call.verb == "patch", times=3, after=True)
            roll_out(settings, NEW)
        case _:
            loopback.fail(
                internal_error(), lambda call: call.verb == "get", times=12
            )  # one call is not retried so often
            roll_out(settings, NEW)
    assert served(loopback) == {NEW}
