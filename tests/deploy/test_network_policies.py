"""Who reaches whom: the NetworkPolicies, read as a cluster's network reads them."""

from dataclasses import dataclass

import pytest
from rendered import PARTS, Object, named, objects, pod_specs, serving, settings_of

HERE = "evernear"


@dataclass(frozen=True)
class Peer:
    """A pod, in the namespace of ours or in another with these labels."""

    labels: Object
    namespace: str = HERE
    namespace_labels: Object | None = None

    @property
    def namespace_has(self) -> Object:
        return {"kubernetes.io/metadata.name": self.namespace, **(self.namespace_labels or {})}


def reaches(found: list[Object], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether both ends let the connection through; a pod that no policy of a direction selects is open in it."""
    out = _policies(found, source, "Egress")
    into = _policies(found, target, "Ingress")
    return _passes(out, "egress", "to", target, port, protocol) and _passes(
        into, "ingress", "from", source, port, protocol
    )


def _policies(found: list[Object], pod: Peer, direction: str) -> list[Object] | None:
    if pod.namespace != HERE:
        return None
    specs = [each["spec"] for each in found if each["kind"] == "NetworkPolicy"]
    return [s for s in specs if direction in s["policyTypes"] and _selects(s["podSelector"], pod.labels)] or None


def _passes(policies: list[Object] | None, rules: str, who: str, peer: Peer, port: int, protocol: str) -> bool:
    if policies is None:
        return True
    wanted = (port, protocol)
    return any(
        (who not in rule or any(_is(each, peer) for each in rule[who]))
        and ("ports" not in rule or any((p["port"], p.get("protocol", "TCP")) == wanted for p in rule["ports"]))
        for policy in policies
        for rule in policy.get(rules, [])
    )


def _is(told: Object, peer: Peer) -> bool:
    assert told.keys() <= {"podSelector", "namespaceSelector"}
    if "namespaceSelector" in told:
        if not _selects(told["namespaceSelector"], peer.namespace_has):
            return False
    elif peer.namespace != HERE:
        return False
    return _selects(told.get("podSelector", {}), peer.labels)


def _selects(selector: Object, labels: Object) -> bool:
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def component(found: list[Object], name: str) -> Peer:
    """The pods of one of our components."""
    (labels,) = (
        spec["labels"] for spec in pod_specs(found).values() if spec["labels"]["app.kubernetes.io/component"] == name
    )
    return Peer(labels)


DNS = Peer({"k8s-app": "kube-dns"}, "kube-system")
KFP = Peer({"app": "ml-pipeline"}, "kubeflow")
STEP = Peer({"pipelines.kubeflow.org/v2_component": "true"}, "kubeflow")
CLIENT = Peer({}, "shop", {"evernear.dev/client": "true"})
GATEWAY = Peer({"istio": "ingressgateway"}, "istio-system", {"evernear.dev/client": "true"})
STRANGER = Peer({}, "elsewhere")
INTERNET = Peer({}, "out-there")
PROMETHEUS = Peer({"app.kubernetes.io/name": "prometheus"}, "monitoring")


@pytest.fixture(params=["local", "production"])
def found(request: pytest.FixtureRequest) -> list[Object]:
    rendered = objects(request.param)
    return [*rendered, *serving(rendered)]


def test_predictions_go_their_way_and_no_other(found: list[Object]) -> None:
    server, prep = component(found, "serving"), component(found, "prep")
    loaded = settings_of(found)
    grpc, http = loaded.serving.grpc_inference_port, loaded.serving.inference_port
    assert reaches(found, CLIENT, prep, loaded.prep.port)
    assert reaches(found, prep, server, grpc)
    assert reaches(found, STEP, server, http)  # the smoke test of the deploy step
    assert not reaches(found, STRANGER, prep, loaded.prep.port)
    assert not reaches(found, STRANGER, server, http)
    assert not reaches(found, CLIENT, server, http)
    for port in (loaded.serving.management_port, loaded.serving.grpc_management_port):
        assert not any(reaches(found, peer, server, port) for peer in (prep, CLIENT, STEP, STRANGER, PROMETHEUS))


@pytest.mark.parametrize("name", ["slack", "watch"])
def test_who_starts_runs_reaches_kfp_and_the_internet_but_no_prediction(found: list[Object], name: str) -> None:
    bot = component(found, name)
    loaded = settings_of(found)
    assert loaded.pipeline.endpoint == "http://ml-pipeline.kubeflow.svc:8888"
    assert reaches(found, bot, KFP, 8888)
    assert reaches(found, bot, INTERNET, 443)
    assert not reaches(found, bot, component(found, "serving"), loaded.serving.inference_port)
    assert not reaches(found, bot, component(found, "prep"), loaded.prep.port)
    assert not any(reaches(found, peer, bot, port) for peer in (STRANGER, CLIENT, STEP) for port in (3000, 8091))


def test_every_pod_finds_names_and_its_store(found: list[Object]) -> None:
    for name, spec in pod_specs(found).items():
        pod = Peer(spec["labels"])
        if spec["labels"]["app.kubernetes.io/component"] != "object-store":
            assert reaches(found, pod, DNS, 53, "UDP"), name
            assert reaches(found, pod, DNS, 53), name
            assert reaches(found, pod, INTERNET, 443), name


def test_the_trial_store_is_reached_by_those_who_have_keys() -> None:
    rendered = objects("local")
    found = [*rendered, *serving(rendered)]
    store = component(found, "object-store")
    (port,) = (each["targetPort"] for each in named(found, "Service")["evernear-seaweedfs"]["spec"]["ports"])
    assert port == "s3"
    (container,) = named(found, "Deployment")["evernear-seaweedfs"]["spec"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "s3", "containerPort": 8333}]
    for name, spec in pod_specs(found).items():
        if spec["labels"]["app.kubernetes.io/component"] != "object-store":
            assert reaches(found, Peer(spec["labels"]), store, 8333), name
    assert reaches(found, STEP, store, 8333)
    assert not reaches(found, STRANGER, store, 8333)
    assert not reaches(found, CLIENT, store, 8333)
    assert not reaches(found, store, INTERNET, 443)
    # Master, filer, volume server, and the gRPC port of the gateway.
    for unguarded in (9333, 19333, 8888, 18888, 8080, 18080, 18333):
        assert not any(reaches(found, peer, store, unguarded) for peer in (STEP, CLIENT, component(found, "prep")))


def test_prometheus_reads_metrics_and_strangers_do_not() -> None:
    rendered = objects("production")
    found = [*rendered, *serving(rendered)]
    loaded = settings_of(found)
    assert reaches(found, PROMETHEUS, component(found, "serving"), loaded.serving.metrics_port)
    assert reaches(found, PROMETHEUS, component(found, "prep"), loaded.prep.port)
    assert not reaches(found, PROMETHEUS, component(found, "serving"), loaded.serving.inference_port)
    assert not reaches(found, CLIENT, component(found, "serving"), loaded.serving.metrics_port)


@pytest.mark.parametrize("part", [part for part in PARTS if "kserve" in part])
def test_kserve_is_reached_by_clients_and_reaches_itself(part: str) -> None:
    found = objects(part)
    pods = {name: Peer(spec["labels"]) for name, spec in pod_specs(found).items() if name.startswith("Inference")}
    for pod in pods.values():
        assert reaches(found, CLIENT, pod, 8080)
        assert not reaches(found, STRANGER, pod, 8080)
        assert reaches(found, pod, INTERNET, 443)
        assert all(reaches(found, pod, other, 8080) for other in pods.values())
    activator = Peer({"app": "activator"}, "knative-serving")
    assert all(reaches(found, activator, pod, 8012) == ("knative" in part) for pod in pods.values())
    assert all(reaches(found, pod, GATEWAY, 8081) == ("knative" in part) for pod in pods.values())


@pytest.mark.parametrize("part", PARTS)
def test_no_policy_is_for_nobody(part: str) -> None:
    found = [*objects(part), *serving(objects(part))]
    pods = [spec["labels"] for spec in pod_specs(found).values()]
    for name, policy in named(found, "NetworkPolicy").items():
        assert any(_selects(policy["spec"]["podSelector"], labels) for labels in pods), name
