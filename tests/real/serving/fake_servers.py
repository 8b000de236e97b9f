"""Fake servers on real sockets, for behavior that the real ones cannot be made to show on
demand."""

import http.server
import json
import math
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from evernear.data.preprocess import Preprocessing
from evernear.serving.client.grpc import PREDICTIONS
from evernear.serving.client.inference_pb2 import PredictionResponse, PredictionsRequest
from evernear.serving.responses import PIXELS_FIELD, PREPROCESSING_FIELD

NEAR = [{"label": "7", "dist": 0.5, "row": 0}]
ANSWER = {"pred": "7", "dist": 0.5, "unknown": False, "neighbors": NEAR, "version": "v"}
Answer = Callable[[PredictionsRequest, grpc.ServicerContext], bytes]


def answers(request: PredictionsRequest, **changes: object) -> bytes:
    """One answer for each image whose pixels are in ``request``."""
    shape = Preprocessing.model_validate_json(request.input[PREPROCESSING_FIELD]).shape
    count = len(request.input[PIXELS_FIELD]) // math.prod(shape)
    return json.dumps([ANSWER | changes] * count).encode()


class Http(http.server.BaseHTTPRequestHandler):
    status, body = 200, json.dumps(ANSWER).encode()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def http_server(tls: ssl.SSLContext | None = None, **answer: object) -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Http,), answer)) as server:
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def grpc_server(
    answer: Answer, port: int = 0, credentials: grpc.ServerCredentials | None = None, host: str = "127.0.0.1"
) -> Iterator[int]:
    """``answer(request, context)`` returns the bytes of a prediction, or aborts."""
    server = grpc.server(ThreadPoolExecutor(4))
    handler = grpc.unary_unary_rpc_method_handler(
        lambda request, context: PredictionResponse(prediction=answer(request, context)),
        PredictionsRequest.FromString,
        PredictionResponse.SerializeToString,
    )
    service, method = PREDICTIONS[1:].split("/")
    server.add_registered_method_handlers(service, {method: handler})
    address = f"{host}:{port}"
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()
