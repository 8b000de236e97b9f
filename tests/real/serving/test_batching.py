"""Which requests wait for others, on a server that would let each batch wait for a minute."""

import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from evernear.release.archive_reader import open_release
from evernear.release.manifest import MODEL_CONFIG_FILE
from evernear.serving import torchserve
from evernear.serving.configuration import model_store
from evernear.serving.endpoints import home_of
from evernear.settings import Settings
from tests.releases import MakeRelease, PackedRelease, forge, settings_on_free_ports
from tests.served import Served, serving
from tests.waiting import until

MAX_DELAY_S = 60  # more than three predictions take on a busy machine
QUEUED = 3
BATCHES = re.compile(r"^evernear_batch_size_(count|sum)\{.*\} (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def delayed_release(make_release: MakeRelease, tmp_path_factory: pytest.TempPathFactory) -> PackedRelease:
    config = f"batchSize: {QUEUED}\nmaxBatchDelay: {1000 * MAX_DELAY_S}\nresponseTimeout: 120\n".encode()
    return forge(make_release(), tmp_path_factory.mktemp("delayed") / "release.mar", **{MODEL_CONFIG_FILE: config})


@pytest.fixture(scope="module", params=["registered while it runs", "loaded at startup"])
def server(
    request: pytest.FixtureRequest, delayed_release: PackedRelease, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    workdir = tmp_path_factory.mktemp("server")
    if request.param == "registered while it runs":
        with serving(delayed_release, workdir) as served:
            yield served
        return
    settings = Settings(workdir=workdir, serving=settings_on_free_ports())
    home = home_of(workdir)
    model_store(home).mkdir(parents=True)
    shutil.copy(delayed_release.archive, model_store(home) / "embedding.mar")
    torchserve.start_server(settings.serving, home, model_api=False)
    try:
        torchserve.await_ready(settings.serving, home, delayed_release.version)
        yield Served(settings, open_release(delayed_release.archive, workdir / "opened"))
    finally:
        torchserve.stop_server(home)


def test_a_request_that_arrives_alone_does_not_wait(server: Served) -> None:
    started_s = time.monotonic()
    for _ in range(3):
        assert predict(server)
    assert time.monotonic() - started_s < MAX_DELAY_S


def test_requests_that_arrive_while_the_worker_is_busy_form_a_batch(server: Served) -> None:
    (worker,) = [process for process in torchserve.processes(server.home) if "java" not in process.name()]
    images = received(server)
    count = await_reported(server, images)
    with ThreadPoolExecutor(1 + QUEUED) as pool:
        worker.send_signal(signal.SIGSTOP)
        try:
            sent = [pool.submit(predict, server)]
            await_received(server, images + 1)
            sent += [pool.submit(predict, server) for _ in range(QUEUED)]
            await_received(server, images + 1 + QUEUED)
        finally:
            worker.send_signal(signal.SIGCONT)
        assert all(future.result() for future in sent)
    assert await_reported(server, images + 1 + QUEUED) == count + 2


def predict(server: Served) -> bool:
    image, query = server.parts.smoke_queries()[0]
    with server.client() as client:
        return client.predict(image).pred == query.pred


def await_received(server: Served, total: int) -> None:
    """Wait until the server has received ``total`` requests, and put them where the worker takes
    them."""
    until(lambda: received(server) == total)
    time.sleep(0.5)


def await_reported(server: Served, total: int) -> int:
    """Wait until the worker has reported ``total`` images, and return the number of its batches."""
    until(lambda: reported(server)["sum"] == total)
    return reported(server)["count"]


def received(server: Served) -> int:
    lines = metrics(server).splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("ts_inference_requests_total{"))


def reported(server: Served) -> Counter[str]:
    """The ``count`` of batches and the ``sum`` of their images."""
    return Counter({name: int(float(value)) for name, value in BATCHES.findall(metrics(server))})


def metrics(server: Served) -> str:
    return requests.get(f"http://127.0.0.1:{server.settings.serving.metrics_port}/metrics", timeout=10).text
