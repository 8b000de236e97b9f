"""One predictor, and a transformer for each protocol of the predictor."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evernear.common.store import open_store
from evernear.release.registry import Registry
from tests.collector import Collector, collecting
from tests.integrations.kserve.inference_service import PROTOCOLS, TRACED, V1_LOGGING, Server
from tests.ports import loopback_ipv6
from tests.releases import PackedRelease


@pytest.fixture(scope="session")
def champion_store(release: PackedRelease, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URI of a store whose champion is the release."""
    store = (tmp_path_factory.mktemp("kserve") / "store").as_uri()
    registry = Registry(open_store(store))
    registry.publish(release.archive)
    registry.set_champion(release.version, registry.champion())
    return store


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """The collector of the traces of `service`."""
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def service(
    release: PackedRelease, champion_store: str, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """The processes; the predictor loads from a directory, the transformers from the registry."""
    logs: Path = tmp_path_factory.mktemp("logs")
    traced = collector.environment
    model_dir = str(release.archive.parent)
    # On all addresses, also of IPv6. The transformers call it although no proxy is reachable.
    anywhere = ("--host", "::") if loopback_ipv6() else ()
    predictor = Server(logs / "predictor.log", "--model_dir", model_dir, *anywhere, environment=traced)
    proxies = {"v2": {"http_proxy": "http://127.0.0.1:1"}, "grpc-v2": {"grpc_proxy": "http://127.0.0.1:1"}}
    servers = {"predictor": predictor}
    for protocol in PROTOCOLS:
        port = predictor.grpc_port if protocol == "grpc-v2" else predictor.http_port
        host = "127.0.0.1" if protocol == "v1" or not anywhere else "[::1]"
        servers[protocol] = Server(
            *(logs / f"{protocol}.log", "--store", champion_store, "--release", release.version),
            *("--predictor_host", f"{host}:{port}", "--predictor_protocol", protocol),
            *("--predictor_request_timeout_seconds", "10"),
            *(V1_LOGGING if protocol == "v1" else ()),
            environment=(traced if protocol in TRACED else {}) | proxies.get(protocol, {}),
        )
    try:
        for server in servers.values():
            server.start()
        for server in servers.values():
            server.await_answer("/")
        yield servers
    finally:
        started = [server for server in servers.values() if server.process is not None]
        with ThreadPoolExecutor() as pool:
            ended = [*pool.map(Server.stop, started)]
    assert ended == [0] * len(servers), "SIGTERM is a clean shutdown"


@pytest.fixture(params=("predictor", *PROTOCOLS))
def each_server(request: pytest.FixtureRequest, service: dict[str, Server]) -> Server:
    """Each server in turn; they are indistinguishable to clients."""
    return service[request.param]


@pytest.fixture
def predictor_server(service: dict[str, Server]) -> Server:
    return service["predictor"]


@pytest.fixture(params=PROTOCOLS)
def transformer(request: pytest.FixtureRequest, service: dict[str, Server]) -> Server:
    return service[request.param]
