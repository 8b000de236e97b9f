"""A predictor and a transformer as processes, and requests to them."""

import base64
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
from numpy.typing import NDArray

from evernear.serving.http import open_inference_pb2
from tests.ports import free_ports

PROTOCOLS = ("v1", "v2", "grpc-v2")
TRACED = ("v1", "grpc-v2")
"""The transformers that export traces; the other one shows that traces are off by default."""
READY_TIMEOUT_S = 240
END_TIMEOUT_S = 60
V1_LOGGING = ("--enable_access_log",)


class Server:
    """One process of an InferenceService, whose ports survive restarts."""

    def __init__(self, log: Path, *options: str, environment: Mapping[str, str] | None = None) -> None:
        self.http_port, self.grpc_port = free_ports(2)
        self.url = f"http://127.0.0.1:{self.http_port}"
        self.host = options[options.index("--host") + 1] if "--host" in options else "127.0.0.1"
        self.log = log
        self._options = options
        self._environment = {**os.environ, **(environment or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self._client: httpx.Client | None = None

    def start(self, *options: str) -> None:
        """Start the process; ``options`` override those of the constructor."""
        ports = ("--http_port", str(self.http_port), "--grpc_port", str(self.grpc_port))
        command = [sys.executable, "-m", "evernear.serving.http", *ports, *self._options, *options]
        self._client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment)

    def await_answer(self, path: str) -> None:
        """Wait until GET ``path`` returns any response."""
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(httpx.TransportError):
                self.get(path)
                return
            time.sleep(0.2)
        raise AssertionError(self.log.read_text())

    def stop(self) -> int:
        """Send SIGTERM; returns the exit status."""
        assert self.process is not None
        assert self._client is not None
        self._client.close()
        self.process.terminate()
        try:
            return self.process.wait(END_TIMEOUT_S)
        finally:
            self.process.kill()

    @contextlib.contextmanager
    def frozen(self):
        """Stop the process, which then accepts connections but does not respond."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.request("POST", path, **body)

    def request(self, method: str, path: str, **body: Any) -> httpx.Response:
        assert self._client is not None
        return self._client.request(method, path, **body)

    def predict(self, images: Sequence[bytes], **headers: str) -> httpx.Response:
        """Predict with v1."""
        instances = [{"data": base64.b64encode(image).decode()} for image in images]
        return self.post("/v1/models/embedding:predict", json={"instances": instances}, headers=headers)

    def infer(self, *inputs: dict[str, Any]) -> httpx.Response:
        """Predict with v2 over REST."""
        return self.post("/v2/models/embedding/infer", json={"inputs": list(inputs)})

    def grpc(self, method: str, request: Any, answer: str) -> Any:
        """Call a method of v2 over gRPC, also with bytes that are no message; ``answer`` is the
        name of the response message."""
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            call = channel.unary_unary(
                f"/inference.GRPCInferenceService/{method}",
                request_serializer=None if isinstance(request, bytes) else type(request).SerializeToString,
                response_deserializer=getattr(open_inference_pb2, answer).FromString,
            )
            return call(request, timeout=60)

    def infer_grpc(self, name: str, datatype: str, shape: Sequence[int], **data: Any) -> Any:
        """``data`` is ``raw=bytes``, or one field of the message InferTensorContents."""
        raw = [data.pop("raw")] if "raw" in data else []
        tensor = {"name": name, "datatype": datatype, "shape": shape} | ({"contents": data} if data else {})
        request = open_inference_pb2.ModelInferRequest(model_name="embedding", inputs=[tensor], raw_input_contents=raw)
        return self.grpc("ModelInfer", request, "ModelInferResponse")


def files(images: Sequence[bytes]) -> dict[str, Any]:
    """The v2 input with image files in JSON."""
    data = [base64.b64encode(image).decode() for image in images]
    return {"name": "images", "datatype": "BYTES", "shape": [len(images)], "data": data}


def pixels(array: NDArray[np.uint8]) -> dict[str, Any]:
    """The v2 input with prepared images in JSON."""
    return {"name": "pixels", "datatype": "UINT8", "shape": list(array.shape), "data": array.ravel().tolist()}


def predictions_of(response: Any) -> list[dict[str, Any]]:
    """The predictions in a v2 response of REST (a dict) or gRPC (a message with listed
    contents)."""
    if isinstance(response, dict):
        columns = {output["name"]: output["data"] for output in response["outputs"]}
    else:
        columns = {output.name: _contents(output) for output in response.outputs}
    k = len(columns["neighbor_dists"]) // max(1, len(columns["pred"]))
    neighbors = [
        {"label": label, "dist": dist, "row": row}
        for label, dist, row in zip(*(columns[f"neighbor_{name}s"] for name in ("label", "dist", "row")), strict=True)
    ]
    return [
        {
            **{name: columns[name][row] for name in ("pred", "dist", "unknown", "version")},
            "neighbors": neighbors[row * k : (row + 1) * k],
        }
        for row in range(len(columns["pred"]))
    ]


def _contents(output: Any) -> list[Any]:
    kinds = {"BYTES": "bytes", "FP32": "fp32", "BOOL": "bool", "INT64": "int64"}
    field = f"{kinds[output.datatype]}_contents"
    return [v.decode() if isinstance(v, bytes) else v for v in getattr(output.contents, field)]
