"""Objects that a deployment applies:
valid for the oldest and newest supported Kubernetes, and hardened."""

import tomllib
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest

from evernear.deployment.kubernetes import KubernetesTarget
from evernear.deployment.kubernetes.cluster import REVISION
from evernear.deployment.kubernetes.objects import serving_objects
from evernear.deployment.kubernetes.pod_template import ServedRelease
from evernear.errors import SettingsError
from evernear.serving.configuration import DRAIN_TIMEOUT_S
from evernear.settings import Settings, load
from evernear.settings.serving import STARTUP_TIMEOUT_S

Tree = dict[str, Any]
OLDEST, NEWEST = "1.30", "1.37"
RELEASE = ServedRelease("20260101.000000.52dd9167", "b" * 64, "c" * 64)
IMAGE = "registry.example/evernear-serve@sha256:" + "a" * 64
ALL = ["kubernetes.token_secret=evernear-token", "serving.workers=2", "kubernetes.cpu=5"]
COLLECTOR = {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector.monitoring:4318"}
GPU_TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
OWNERS: Tree = {
    "metadata": {"name": "evernear-serving"},
    "template": {
        "metadata": {"labels": {"team": "vision", "app.kubernetes.io/version": "theirs"}, "creationTimestamp": None},
        "spec": {
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [GPU_TOLERATION],
            "imagePullSecrets": [{"name": "registry"}],
            "terminationGracePeriodSeconds": 1,
            "initContainers": [
                {"name": "fetch", "image": "theirs", "envFrom": [{"secretRef": {"name": "team-reader"}}]},
            ],
            "containers": [
                {
                    "name": "torchserve",
                    "image": "theirs",
                    "env": [COLLECTOR, {"name": "EVERNEAR_WORKDIR", "value": "/theirs"}],
                    "envFrom": [{"secretRef": {"name": "evernear-milvus"}}],
                    "resources": {"limits": {"nvidia.com/gpu": "1", "memory": "1Mi"}},
                    "volumeMounts": [{"name": "tmp", "mountPath": "/models"}, {"name": "tmp", "mountPath": "/tmp"}],
                },
                {"name": "sidecar", "image": "registry.example/sidecar"},
            ],
        },
    },
}


def settings(*overrides: str, store: str = "s3://bucket/prefix") -> Settings:
    return load(environment={}, overrides=[f"store={store}", f"kubernetes.image={IMAGE}", *overrides])


def objects(*overrides: str, store: str = "s3://bucket/prefix", release: ServedRelease = RELEASE) -> dict[str, Tree]:
    manifests = serving_objects(settings(*overrides, store=store), release)
    return {manifest["kind"]: manifest for manifest in manifests}


def pod(manifests: dict[str, Tree]) -> Tree:
    return manifests["Deployment"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("owners", [None, OWNERS])
@pytest.mark.parametrize("overrides", [[], ALL, ["store=file:///mnt/store", "kubernetes.store_claim=store"]])
def test_objects_match_the_schema(version: str, overrides: list[str], owners: Tree | None) -> None:
    manifests = serving_objects(settings(*overrides), RELEASE, owners)
    assert len(manifests) == 7
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_labels_and_annotations_name_the_release() -> None:
    manifests = objects()
    for manifest in manifests.values():
        assert manifest["metadata"]["labels"]["app.kubernetes.io/version"] == RELEASE.version
        assert manifest["metadata"]["annotations"] == {
            "evernear.dev/release": RELEASE.version,
            "evernear.dev/manifest-sha256": RELEASE.manifest_sha256,
            "evernear.dev/archive-sha256": RELEASE.archive_sha256,
        }
    template = manifests["Deployment"]["spec"]["template"]
    assert template["metadata"]["labels"]["app.kubernetes.io/version"] == RELEASE.version


def test_selectors_match_the_pods_of_every_release() -> None:
    manifests = objects()
    deployment = manifests["Deployment"]["spec"]
    expected = deployment["selector"]["matchLabels"]
    assert manifests["Service"]["spec"]["selector"] == expected
    assert manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == expected
    assert manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == expected
    for version in (RELEASE.version, "20270101.000000.00000000"):
        labels = objects(release=ServedRelease(version, "b" * 64, "c" * 64))["Deployment"]["spec"]["template"]
        assert expected.items() <= labels["metadata"]["labels"].items()


def test_revision_changes_with_the_pod() -> None:
    def revision(*overrides: str, release: ServedRelease = RELEASE) -> str:
        return objects(*overrides, release=release)["Deployment"]["spec"]["template"]["metadata"]["labels"][REVISION]

    assert revision() == revision()
    others = [revision("kubernetes.memory=3Gi"), revision("serving.batch_size=8")]
    others.append(revision(release=ServedRelease(RELEASE.version, "d" * 64, "c" * 64)))
    assert len({revision(), *others}) == 4


def test_memory_of_a_pod_follows_from_the_release() -> None:
    def memory(*overrides: str, index_size_bytes: int = 0) -> str:
        release = replace(RELEASE, index_size_bytes=index_size_bytes)
        containers = objects(*overrides, release=release)["Deployment"]["spec"]["template"]["spec"]["containers"]
        return containers[0]["resources"]["limits"]["memory"]

    assert memory() == "2048Mi"
    assert memory(index_size_bytes=1024 * 2**20) == "3072Mi"
    assert memory("kubernetes.memory=3Gi", index_size_bytes=1024 * 2**20) == "3Gi"


@pytest.mark.parametrize(
    ("overrides", "release", "sentence"),
    [
        (["kubernetes.memory=1Gi"], RELEASE, "a pod needs 2048Mi or more, depending on the release"),
        (["kubernetes.memory=2047Mi"], RELEASE, "a pod needs 2048Mi or more, depending on the release"),
        (["kubernetes.memory=2Gi", "serving.workers=2"], RELEASE, "a pod needs 3072Mi or more"),
        (["kubernetes.memory=2Gi"], replace(RELEASE, index_size_bytes=2**30), "a pod needs 3072Mi. With"),
        (["kubernetes.memory=2Gi"], replace(RELEASE, worker_parts_size_bytes=2**30), "a pod needs 3072Mi. With"),
    ],
)
def test_memory_below_the_default_is_refused(overrides: list[str], release: ServedRelease, sentence: str) -> None:
    with pytest.raises(SettingsError, match=r"^Invalid setting kubernetes\.memory = .*leave it out") as refused:
        objects(*overrides, release=release)
    assert sentence in str(refused.value)
    assert pod(objects(*overrides[1:], release=release))


def test_memory_is_checked_before_the_first_step_reads_images() -> None:
    """The cluster is not asked, so that none is needed here."""
    target = KubernetesTarget(
        settings("kubernetes.memory=1Gi", "kubernetes.store_claim=store", store="file:///nowhere")
    )
    with pytest.raises(SettingsError, match=r"a pod needs 2048Mi or more, depending on the release"):
        target.require_deployable()


def test_lower_limits_of_serving_make_room() -> None:
    assert objects("kubernetes.memory=1280Mi", "serving.batch_size=1", "serving.max_pixels=1000000",
                   "serving.max_request_size_bytes=1000000")  # fmt: skip


def test_only_the_autoscaler_sets_the_number_of_replicas() -> None:
    manifests = objects("kubernetes.replicas_min=3", "kubernetes.replicas_max=3")
    assert "replicas" not in manifests["Deployment"]["spec"]
    autoscaler = manifests["HorizontalPodAutoscaler"]["spec"]
    assert (autoscaler["minReplicas"], autoscaler["maxReplicas"]) == (3, 3)
    assert autoscaler["scaleTargetRef"]["name"] == manifests["Deployment"]["metadata"]["name"]


def test_only_the_init_container_has_the_store_keys() -> None:
    spec = pod(objects("kubernetes.token_secret=evernear-token"))
    fetch, serve = spec["initContainers"][0], spec["containers"][0]
    assert fetch["envFrom"] == [{"secretRef": {"name": "evernear-s3-reader", "optional": True}}]
    assert {"name": "EVERNEAR_STORE", "value": "s3://bucket/prefix"} in fetch["env"]
    assert "envFrom" not in serve
    assert not any(variable["name"] == "EVERNEAR_STORE" for variable in serve["env"])
    assert "token" in {mount["name"] for mount in serve["volumeMounts"]}
    assert "token" not in {mount["name"] for mount in fetch["volumeMounts"]}


def test_server_runs_without_token_if_no_secret_is_set() -> None:
    assert "--without-token" in pod(objects())["containers"][0]["command"]
    assert "--without-token" not in pod(objects("kubernetes.token_secret=token"))["containers"][0]["command"]


def owned_pod(*overrides: str) -> Tree:
    """The template of a pod to which `OWNERS` adds."""
    manifests = {manifest["kind"]: manifest for manifest in serving_objects(settings(*overrides), RELEASE, OWNERS)}
    return manifests["Deployment"]["spec"]["template"]


def test_owner_adds_what_a_release_does_not_set() -> None:
    template = owned_pod()
    spec, (serve, sidecar) = template["spec"], template["spec"]["containers"]
    assert template["metadata"]["labels"]["team"] == "vision"
    assert (spec["nodeSelector"], spec["tolerations"]) == ({"pool": "gpu"}, [GPU_TOLERATION])
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert COLLECTOR in serve["env"]
    assert serve["envFrom"] == [{"secretRef": {"name": "evernear-milvus"}}]
    assert serve["resources"]["limits"] == {"cpu": "2", "memory": "2048Mi", "nvidia.com/gpu": "1"}
    assert [mount["mountPath"] for mount in serve["volumeMounts"] if mount["name"] == "tmp"] == ["/tmp", "/models"]
    assert sidecar["name"] == "sidecar"
    sources = [source["secretRef"]["name"] for source in spec["initContainers"][0]["envFrom"]]
    assert sources == ["evernear-s3-reader", "team-reader"], "the later one overrides the variables of the first"


def test_owner_changes_nothing_that_a_release_sets() -> None:
    template, own = owned_pod(), objects()["Deployment"]["spec"]["template"]

    def kept(value: Any, of: Any) -> bool:
        if isinstance(of, dict):
            return all(kept(value[key], each) for key, each in of.items() if key != REVISION)
        if isinstance(of, list):
            return all(any(kept(item, each) for item in value) for each in of)
        return value == of

    assert kept(template, own)
    labels = [each["metadata"]["labels"][REVISION] for each in (template, own)]
    assert labels[0] != labels[1], "other pods are another revision"


def test_management_api_is_not_exposed() -> None:
    manifests = objects()
    serving = settings().serving
    management = {serving.management_port, serving.grpc_management_port}
    ports = {port["containerPort"] for port in pod(manifests)["containers"][0]["ports"]}
    ports |= {port["port"] for port in manifests["Service"]["spec"]["ports"]}
    ports |= {port["port"] for rule in manifests["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]}
    assert ports == {serving.inference_port, serving.grpc_inference_port, serving.metrics_port}
    assert not ports & management
    predictions, metrics = manifests["NetworkPolicy"]["spec"]["ingress"]
    assert {"podSelector": {}} in predictions["from"]
    assert {"podSelector": {}} not in metrics["from"]


def test_config_map_contains_the_serving_settings() -> None:
    expected = settings("serving.batch_size=8", "serving.workers=3", "serving.query_log=off")
    manifests = {manifest["kind"]: manifest for manifest in serving_objects(expected, RELEASE)}
    pod_settings = Settings.model_validate(tomllib.loads(manifests["ConfigMap"]["data"]["evernear.toml"]))
    assert pod_settings.serving == expected.serving


def test_pod_has_time_to_start_and_to_drain() -> None:
    spec = pod(objects())
    (serve,) = spec["containers"]
    program, delay_s = serve["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    assert spec["terminationGracePeriodSeconds"] > int(delay_s) + DRAIN_TIMEOUT_S
    probe = serve["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] >= STARTUP_TIMEOUT_S


def test_claim_is_mounted_at_the_path_of_the_store() -> None:
    manifests = objects("kubernetes.store_claim=evernear-store", store="file:///mnt/the%20store")
    fetch = pod(manifests)["initContainers"][0]
    assert {"name": "store", "mountPath": "/mnt/the store", "readOnly": True} in fetch["volumeMounts"]
    assert "envFrom" not in fetch
    assert manifests["NetworkPolicy"]["spec"]["egress"] == []


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["kubernetes.image="], "needs the serving image by its digest"),
        (["store=file:///mnt/store"], "Pods cannot read the store file:///mnt/store"),
        (["kubernetes.store_claim=store"], r"is for a store file:///path, and the store is s3://bucket/prefix"),
        (
            ["store=file:///mnt/store", "kubernetes.store_claim=store", "kubernetes.query_secret=queries"],
            "query_secret=queries is for an object store",
        ),
        (["kubernetes.image=registry.example/evernear-serve:latest"], "kubernetes.image"),
        (["kubernetes.image=registry.example/evernear-serve@sha256:abc"], "kubernetes.image"),
        (["kubernetes.replicas_max=1"], "replicas_max is less than replicas_min, 2"),
        (["kubernetes.cpu=two"], "kubernetes.cpu"),
        (["kubernetes.memory=2GB"], "kubernetes.memory"),
        (["kubernetes.name=Evernear"], "kubernetes.name"),
    ],
)
def test_invalid_settings_are_rejected_with_a_message(overrides: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        serving_objects(settings(*overrides), RELEASE)


def test_queries_are_shipped_by_a_sidecar_with_separate_keys() -> None:
    manifests = objects("kubernetes.query_secret=evernear-s3-queries")
    for version in (OLDEST, NEWEST):
        kubernetes_validate.validate(manifests["Deployment"], version, strict=True)
    fetch, ship = pod(manifests)["initContainers"]
    (serve,) = pod(manifests)["containers"]
    assert ship["restartPolicy"] == "Always"
    assert ship["command"][:3] == ["evernear", "watch", "--ship"]
    assert [fetch["envFrom"], ship["envFrom"]] == [
        [{"secretRef": {"name": "evernear-s3-reader", "optional": True}}],
        [{"secretRef": {"name": "evernear-s3-queries"}}],
    ]
    assert "envFrom" not in serve
    assert {mount["name"] for mount in ship["volumeMounts"]} == {mount["name"] for mount in serve["volumeMounts"]}
    assert len(pod(objects())["initContainers"]) == 1
    off = objects("kubernetes.query_secret=evernear-s3-queries", "serving.query_log=off")
    assert len(pod(off)["initContainers"]) == 1


@pytest.mark.parametrize(
    ("overrides", "ports"),
    [
        ([], {53, 443, 8333, 9000}),
        (["store=file:///mnt/store", "kubernetes.store_claim=store"], set[int]()),
        (["store=file:///mnt/store", "kubernetes.store_claim=store", "kubernetes.egress_ports=[19530]"], {53, 19530}),
    ],
)
def test_egress_is_limited_to_the_store_and_to_named_ports(overrides: list[str], ports: set[int]) -> None:
    rules = objects(*overrides)["NetworkPolicy"]["spec"]["egress"]
    assert {port["port"] for rule in rules for port in rule["ports"]} == ports
