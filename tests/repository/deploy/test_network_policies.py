"""NetworkPolicies, evaluated as a cluster's network plugin evaluates them."""

from dataclasses import dataclass

import pytest

from tests.repository.deploy.rendered import PARTS, Object, named, objects, pod_specs, serving, settings_of

HERE = "evernear"


@dataclass(frozen=True)
class Peer:
    """A pod, in evernear's namespace or in another one with these labels."""

    labels: Object
    namespace: str = HERE
    namespace_labels: Object | None = None
    address: str = ""

    @property
    def namespace_has(self) -> Object:
        return {"kubernetes.io/metadata.name": self.namespace, **(self.namespace_labels or {})}


def reaches(manifests: list[Object], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether both ends allow the connection; a direction in which no policy selects the pod is
    open."""
    out = _policies(manifests, source, "Egress")
    into = _policies(manifests, target, "Ingress")
    return _passes(out, "egress", "to", target, port, protocol) and _passes(
        into, "ingress", "from", source, port, protocol
    )


def _policies(manifests: list[Object], pod: Peer, direction: str) -> list[Object] | None:
    if pod.namespace != HERE:
        return None
    specs = [item["spec"] for item in manifests if item["kind"] == "NetworkPolicy"]
    return [s for s in specs if direction in s["policyTypes"] and _selects(s["podSelector"], pod.labels)] or None


def _passes(policies: list[Object] | None, rules: str, key: str, peer: Peer, port: int, protocol: str) -> bool:
    if policies is None:
        return True
    connection = (port, protocol)
    return any(
        (key not in rule or any(_is(item, peer) for item in rule[key]))
        and ("ports" not in rule or any((p["port"], p.get("protocol", "TCP")) == connection for p in rule["ports"]))
        for policy in policies
        for rule in policy.get(rules, [])
    )


def _is(selector: Object, peer: Peer) -> bool:
    assert selector.keys() <= {"podSelector", "namespaceSelector", "ipBlock"}
    if "ipBlock" in selector:
        return selector["ipBlock"]["cidr"] == f"{peer.address}/32"
    if "namespaceSelector" in selector:
        if not _selects(selector["namespaceSelector"], peer.namespace_has):
            return False
    elif peer.namespace != HERE:
        return False
    return _selects(selector.get("podSelector", {}), peer.labels)


def _selects(selector: Object, labels: Object) -> bool:
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def component(manifests: list[Object], name: str) -> Peer:
    """The pods of one of evernear's components."""
    (labels,) = (
        spec["labels"]
        for spec in pod_specs(manifests).values()
        if spec["labels"]["app.kubernetes.io/component"] == name
    )
    return Peer(labels)


DNS = Peer({"k8s-app": "kube-dns"}, "kube-system")
KFP = Peer({"app": "ml-pipeline"}, "kubeflow")
STEP = Peer({"pipelines.kubeflow.org/v2_component": "true"}, "kubeflow")
CLIENT = Peer({}, "shop", {"evernear.dev/client": "true"})
GATEWAY = Peer({"istio": "ingressgateway"}, "istio-system", {"evernear.dev/client": "true"})
OTHER_POD = Peer({}, "elsewhere")
INTERNET = Peer({}, "out-there")
METADATA = [Peer({}, "a node", address=address) for address in ("169.254.169.254", "169.254.170.23")]
PROMETHEUS = Peer({"app.kubernetes.io/name": "prometheus"}, "monitoring")


@pytest.fixture(params=["local", "production"])
def overlay(request: pytest.FixtureRequest) -> list[Object]:
    rendered = objects(request.param)
    return [*rendered, *serving(rendered)]


def test_only_clients_and_the_smoke_test_reach_predictions(overlay: list[Object]) -> None:
    server, prep = component(overlay, "serving"), component(overlay, "prep")
    loaded = settings_of(overlay)
    grpc, http = loaded.serving.grpc_inference_port, loaded.serving.inference_port
    assert reaches(overlay, CLIENT, prep, loaded.prep.port)
    assert reaches(overlay, prep, server, grpc)
    assert reaches(overlay, STEP, server, http)  # the deploy step's smoke test
    assert not reaches(overlay, OTHER_POD, prep, loaded.prep.port)
    assert not reaches(overlay, OTHER_POD, server, http)
    assert not reaches(overlay, CLIENT, server, http)
    for port in (loaded.serving.management_port, loaded.serving.grpc_management_port):
        assert not any(reaches(overlay, peer, server, port) for peer in (prep, CLIENT, STEP, OTHER_POD, PROMETHEUS))


@pytest.mark.parametrize("name", ["slack", "watch"])
def test_bot_and_watcher_reach_kfp_and_the_internet_but_no_predictions(overlay: list[Object], name: str) -> None:
    bot = component(overlay, name)
    loaded = settings_of(overlay)
    assert loaded.pipeline.endpoint == "http://ml-pipeline.kubeflow.svc:8888"
    assert reaches(overlay, bot, KFP, 8888)
    assert reaches(overlay, bot, INTERNET, 443)
    assert not reaches(overlay, bot, component(overlay, "serving"), loaded.serving.inference_port)
    assert not reaches(overlay, bot, component(overlay, "prep"), loaded.prep.port)
    assert not any(reaches(overlay, peer, bot, port) for peer in (OTHER_POD, CLIENT, STEP) for port in (3000, 8091))


def test_prometheus_reaches_the_metrics_of_the_watcher() -> None:
    rendered = objects("production")
    assert reaches(rendered, PROMETHEUS, component(rendered, "watch"), 8091)


def test_every_pod_reaches_dns_and_its_store(overlay: list[Object]) -> None:
    for name, spec in pod_specs(overlay).items():
        pod = Peer(spec["labels"])
        if spec["labels"]["app.kubernetes.io/component"] != "object-store":
            assert reaches(overlay, pod, DNS, 53, "UDP"), name
            assert reaches(overlay, pod, DNS, 53), name
            assert reaches(overlay, pod, INTERNET, 443), name


@pytest.mark.parametrize("name", ["prep", "slack", "watch", "console", "serving"])
def test_pods_reach_what_hands_out_the_keys_of_a_role_only_with_its_component(name: str) -> None:
    for part, expected in (("production, console", False), ("production, roles of AWS", True)):
        rendered = objects(part)
        manifests = [*rendered, *serving(rendered)]
        pod = component(manifests, name)
        for server in METADATA:
            assert reaches(manifests, pod, server, 80) == expected
            assert not reaches(manifests, pod, server, 8080)
        assert reaches(manifests, pod, INTERNET, 443)  # STS


def test_only_pods_with_keys_reach_the_trial_store() -> None:
    rendered = objects("local, console")
    manifests = [*rendered, *serving(rendered)]
    store = component(manifests, "object-store")
    (port,) = (item["targetPort"] for item in named(manifests, "Service")["evernear-seaweedfs"]["spec"]["ports"])
    assert port == "s3"
    (container,) = named(manifests, "Deployment")["evernear-seaweedfs"]["spec"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "s3", "containerPort": 8333}]
    for name, spec in pod_specs(manifests).items():
        if spec["labels"]["app.kubernetes.io/component"] != "object-store":
            assert reaches(manifests, Peer(spec["labels"]), store, 8333), name
    assert reaches(manifests, STEP, store, 8333)
    assert not reaches(manifests, OTHER_POD, store, 8333)
    assert not reaches(manifests, CLIENT, store, 8333)
    assert not reaches(manifests, store, INTERNET, 443)
    # Ports of the master, the filer and the volume server, and the gRPC port of the gateway.
    for unguarded in (9333, 19333, 8888, 18888, 8080, 18080, 18333):
        assert not any(
            reaches(manifests, peer, store, unguarded) for peer in (STEP, CLIENT, component(manifests, "prep"))
        )


def test_only_prometheus_and_the_watcher_reach_metrics() -> None:
    rendered = objects("production")
    manifests = [*rendered, *serving(rendered)]
    loaded = settings_of(manifests)
    assert reaches(manifests, PROMETHEUS, component(manifests, "serving"), loaded.serving.metrics_port)
    assert reaches(manifests, PROMETHEUS, component(manifests, "prep"), loaded.prep.port)
    server = component(manifests, "serving")
    for name in ("watch", "slack", "prep"):
        reader = component(manifests, name)
        assert reaches(manifests, reader, server, loaded.serving.metrics_port) == (name == "watch")
    assert not reaches(manifests, PROMETHEUS, component(manifests, "serving"), loaded.serving.inference_port)
    assert not reaches(manifests, CLIENT, component(manifests, "serving"), loaded.serving.metrics_port)


def test_console_is_reached_by_the_ingress_and_reaches_the_predictor_and_the_pipelines() -> None:
    rendered = objects("production, console")
    manifests = [*rendered, *serving(rendered)]
    console, server = component(manifests, "console"), component(manifests, "serving")
    loaded = settings_of(manifests)
    assert reaches(manifests, CLIENT, console, loaded.console.port)
    assert not reaches(manifests, OTHER_POD, console, loaded.console.port)
    assert reaches(manifests, console, server, loaded.serving.grpc_inference_port)
    assert not reaches(manifests, console, server, loaded.serving.management_port)
    assert reaches(manifests, console, INTERNET, 443)


@pytest.mark.parametrize("part", [part for part in PARTS if "kserve" in part])
def test_clients_reach_kserve_pods_and_these_reach_each_other(part: str) -> None:
    manifests = objects(part)
    pods = {name: Peer(spec["labels"]) for name, spec in pod_specs(manifests).items() if name.startswith("Inference")}
    for pod in pods.values():
        assert reaches(manifests, CLIENT, pod, 8080)
        assert not reaches(manifests, OTHER_POD, pod, 8080)
        assert reaches(manifests, pod, INTERNET, 443)
        assert all(reaches(manifests, pod, other, 8080) for other in pods.values())
    activator = Peer({"app": "activator"}, "knative-serving")
    assert all(reaches(manifests, activator, pod, 8012) == ("knative" in part) for pod in pods.values())
    assert all(reaches(manifests, pod, GATEWAY, 8081) == ("knative" in part) for pod in pods.values())


@pytest.mark.parametrize("part", PARTS)
def test_every_policy_selects_a_pod(part: str) -> None:
    manifests = [*objects(part), *serving(objects(part))]
    pods = [spec["labels"] for spec in pod_specs(manifests).values()]
    for name, policy in named(manifests, "NetworkPolicy").items():
        assert any(_selects(policy["spec"]["podSelector"], labels) for labels in pods), name
