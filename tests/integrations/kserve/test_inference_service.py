"""Transformer and predictor as processes, over real sockets and in every protocol."""

import base64
import http.client
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from evernear.embedding import openvino_version
from evernear.errors import SettingsError
from evernear.release.archive_reader import ReleaseParts
from evernear.serving.core import Predictor
from evernear.serving.http import open_inference, open_inference_pb2
from evernear.serving.http.kserve import arguments, serve_container
from evernear.serving.responses import Neighbor, Prediction
from tests import hostile
from tests.collector import CLIENT_SPAN, Collector, attributes, parent
from tests.dataset_images import saved
from tests.hostile_requests import fuzz, kserve
from tests.integrations.kserve.inference_service import (
    READY_TIMEOUT_S,
    TRACED,
    Server,
    files,
    pixels,
    predictions_of,
)
from tests.ports import free_ports
from tests.releases import MakeRelease, PackedRelease
from tests.waiting import until

# The first test waits for four processes to import the SDK, which on a busy machine takes minutes.
pytestmark = pytest.mark.timeout(600)
BAD = b"no image"
IMAGE_SENTENCE = "The image is not a PNG, JPEG, WebP or HEIC image."


@pytest.fixture(scope="module")
def smoke_images(parts: ReleaseParts) -> list[bytes]:
    return [image for image, _ in parts.smoke_queries()]


@pytest.fixture(scope="module")
def local_predictions(parts: ReleaseParts, smoke_images: list[bytes]) -> list[dict[str, Any]]:
    """The predictions of `Predictor` in this process."""
    answers = Predictor.open(parts).predict(smoke_images)
    assert all(isinstance(answer, Prediction) for answer in answers)
    return [answer.model_dump(mode="json") for answer in answers]


def prepared(images: list[bytes]) -> np.ndarray:
    return np.stack([np.asarray(Image.open(BytesIO(image)), np.uint8)[:, :, None] for image in images])


def photograph() -> bytes:
    """A color JPEG of another size than the release's input."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    return saved(Image.fromarray(noise).resize((300, 200)), "JPEG")


def assert_same(answers: list[dict[str, Any]], stored: list[dict[str, Any]]) -> None:
    assert len(answers) == len(stored)
    for answer, expected in zip(answers, stored, strict=True):
        assert answer.keys() == expected.keys()
        assert (answer["pred"], answer["unknown"], answer["version"]) == (
            expected["pred"],
            expected["unknown"],
            expected["version"],
        )
        assert answer["dist"] == pytest.approx(expected["dist"], abs=1e-4)
        for name in ("label", "row"):
            assert [n[name] for n in answer["neighbors"]] == [n[name] for n in expected["neighbors"]]
        assert [n["dist"] for n in answer["neighbors"]] == pytest.approx(
            [n["dist"] for n in expected["neighbors"]], abs=1e-4
        )


class TestAnswers:
    def test_v1(self, each_server: Server, smoke_images: list[bytes], local_predictions: list[dict[str, Any]]) -> None:
        response = each_server.predict(smoke_images)
        assert response.status_code == 200
        assert_same(response.json()["predictions"], local_predictions)

    def test_v2_over_rest(
        self, each_server: Server, smoke_images: list[bytes], local_predictions: list[dict[str, Any]]
    ) -> None:
        response = each_server.infer(files(smoke_images))
        assert response.status_code == 200
        assert_same(predictions_of(response.json()), local_predictions)

    def test_v2_over_grpc(
        self, each_server: Server, smoke_images: list[bytes], local_predictions: list[dict[str, Any]]
    ) -> None:
        response = each_server.infer_grpc("images", "BYTES", [len(smoke_images)], bytes_contents=smoke_images)
        assert_same(predictions_of(response), local_predictions)

    def test_v2_over_grpc_in_binary(
        self, each_server: Server, smoke_images: list[bytes], local_predictions: list[dict[str, Any]]
    ) -> None:
        raw = b"".join(len(image).to_bytes(4, "little") + image for image in smoke_images)
        response = each_server.infer_grpc("images", "BYTES", [len(smoke_images)], raw=raw)
        names = [output.name for output in response.outputs]
        dists = np.frombuffer(response.raw_output_contents[names.index("dist")], np.float32)
        assert dists.tolist() == pytest.approx([answer["dist"] for answer in local_predictions], abs=1e-4)

    def test_v2_over_rest_in_binary(
        self, each_server: Server, smoke_images: list[bytes], local_predictions: list[dict[str, Any]]
    ) -> None:
        data = len(smoke_images[0]).to_bytes(4, "little") + smoke_images[0]
        outputs = [{"name": "pred"}, {"name": "dist", "parameters": {"binary_data": True}}, {"name": "version"}]
        response = infer_in_binary(each_server, {"binary_data_size": len(data)}, data, outputs=outputs)
        head_size = int(response.headers["Inference-Header-Content-Length"])
        pred, dist, version = json.loads(response.content[:head_size])["outputs"]
        assert (pred["data"], version["data"]) == ([local_predictions[0]["pred"]], [local_predictions[0]["version"]])
        assert dist["parameters"] == {"binary_data_size": 4}
        assert np.frombuffer(response.content[head_size:], "<f4")[0] == pytest.approx(
            local_predictions[0]["dist"], abs=1e-4
        )

    def test_v2_returns_the_requested_outputs(self, each_server: Server, smoke_images: list[bytes]) -> None:
        body = {"id": "7", "inputs": [files(smoke_images[:1])], "outputs": [{"name": "pred"}]}
        result = each_server.post("/v2/models/embedding/infer", json=body).json()
        assert result["id"] == "7"
        assert [output["name"] for output in result["outputs"]] == ["pred"]

    def test_image_of_another_size_is_resized(self, transformer: Server, predictor_server: Server) -> None:
        photo = photograph()
        assert_same(
            transformer.predict([photo]).json()["predictions"], predictor_server.predict([photo]).json()["predictions"]
        )

    def test_predictor_accepts_prepared_pixels(
        self, predictor_server: Server, smoke_images: list[bytes], local_predictions: list[dict[str, Any]]
    ) -> None:
        array = prepared(smoke_images)
        assert_same(predictions_of(predictor_server.infer(pixels(array)).json()), local_predictions)
        listed = predictor_server.infer_grpc("pixels", "UINT8", array.shape, uint_contents=array.ravel().tolist())
        assert_same(predictions_of(listed), local_predictions)
        raw = predictor_server.infer_grpc("pixels", "UINT8", array.shape, raw=array.tobytes())
        labels = raw.raw_output_contents[[output.name for output in raw.outputs].index("pred")]
        assert labels == b"".join(len(a["pred"]).to_bytes(4, "little") + a["pred"].encode() for a in local_predictions)

    def test_transformer_rejects_pixels(self, transformer: Server, smoke_images: list[bytes]) -> None:
        response = transformer.infer(pixels(prepared(smoke_images)))
        assert (response.status_code, response.json()) == (
            400,
            {"error": 'Send one input: "images", BYTES [N]; only the predictor accepts pixels.'},
        )
        inputs = transformer.get("/v2/models/embedding").json()["inputs"]
        assert inputs == [{"name": "images", "datatype": "BYTES", "shape": [-1]}]

    def test_accepts_a_request_without_images(self, each_server: Server) -> None:
        assert each_server.predict([]).json() == {"predictions": []}
        assert predictions_of(each_server.infer(files([])).json()) == []

    def test_serves_concurrent_clients(
        self, each_server: Server, smoke_images: list[bytes], local_predictions: list[dict[str, Any]]
    ) -> None:
        def ask(n: int) -> None:
            at = n % len(smoke_images)
            assert_same(
                each_server.predict(smoke_images[at : at + 1]).json()["predictions"], local_predictions[at : at + 1]
            )

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(64)))


def metric(server: Server, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


class TestBatches:
    """Requests that arrive while the predictor is stopped are all there when it goes on."""

    @pytest.mark.parametrize("protocol", ["v1", "v2", "grpc-v2"])
    def test_concurrent_requests_share_batches_and_a_bad_image_fails_alone(
        self,
        predictor_server: Server,
        smoke_images: list[bytes],
        local_predictions: list[dict[str, Any]],
        protocol: str,
    ) -> None:
        sent = [BAD if n % 8 == 3 else smoke_images[n % len(smoke_images)] for n in range(32)]

        def ask(image: bytes) -> Any:
            try:
                if protocol == "grpc-v2":
                    return predictions_of(predictor_server.infer_grpc("images", "BYTES", [1], bytes_contents=[image]))
                response = (
                    predictor_server.predict([image]) if protocol == "v1" else predictor_server.infer(files([image]))
                )
                body = response.json()
                return body.get("error") or body.get("predictions") or predictions_of(body)
            except grpc.RpcError as error:
                return error.details()

        batches, answered = (metric(predictor_server, f"evernear_batch_images_{name}") for name in ("count", "sum"))
        with ThreadPoolExecutor(len(sent)) as pool:
            with predictor_server.frozen():
                answers = [pool.submit(ask, image) for image in sent]
                time.sleep(0.5)
            for n, (image, answer) in enumerate(zip(sent, answers, strict=True)):
                if image is BAD:
                    assert IMAGE_SENTENCE in answer.result()
                else:
                    assert_same(answer.result(), [local_predictions[n % len(smoke_images)]])
        assert metric(predictor_server, "evernear_batch_images_sum") - answered == 28
        if protocol != "grpc-v2":  # gRPC reads one call at a time, and may answer it before it reads the next
            assert metric(predictor_server, "evernear_batch_images_count") - batches < 28

    def test_requests_of_clients_that_are_gone_are_not_answered(
        self, predictor_server: Server, smoke_images: list[bytes]
    ) -> None:
        body = json.dumps({"instances": [{"data": base64.b64encode(smoke_images[0]).decode()}] * 100}).encode()
        tensor = {
            "name": "images",
            "datatype": "BYTES",
            "shape": [100],
            "contents": {"bytes_contents": smoke_images[:1] * 100},
        }
        message = open_inference_pb2.ModelInferRequest(model_name="embedding", inputs=[tensor]).SerializeToString()
        recognized, log = metric(predictor_server, "evernear_images_total"), predictor_server.log.read_text()
        with predictor_server.frozen(), grpc.insecure_channel(f"127.0.0.1:{predictor_server.grpc_port}") as channel:
            connections = [http.client.HTTPConnection("127.0.0.1", predictor_server.http_port) for _ in range(32)]
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            calls = [call.future(message) for _ in range(32)]
            for connection in connections:
                connection.request("POST", "/v1/models/embedding:predict", body)
            for connection, started in zip(connections, calls, strict=True):
                connection.close()
                started.cancel()
        assert predictor_server.predict(smoke_images[:1]).status_code == 200
        assert metric(predictor_server, "evernear_images_total") - recognized < 32 * 100
        assert "Traceback" not in predictor_server.log.read_text().removeprefix(log)


class TestBadImages:
    def test_v1_bad_image_fails_alone(
        self, each_server: Server, smoke_images: list[bytes], local_predictions: list[dict[str, Any]]
    ) -> None:
        response = each_server.predict([BAD, smoke_images[0], b"", smoke_images[1][:60], smoke_images[1]])
        assert response.status_code == 200
        result = response.json()["predictions"]
        assert_same([result[1], result[4]], local_predictions[:2])
        assert result[0] == {"code": 400, "type": "BadImage", "message": IMAGE_SENTENCE}
        assert all(result[n]["code"] == 400 and result[n]["message"].endswith(".") for n in (2, 3))

    @pytest.mark.parametrize("instance", [{}, {"data": 3}, {"data": "***"}, {"data": "ä"}, "AAAA", None, [1]])
    def test_v1_instance_without_an_image_fails_alone(
        self,
        predictor_server: Server,
        smoke_images: list[bytes],
        local_predictions: list[dict[str, Any]],
        instance: object,
    ) -> None:
        good = {"data": base64.b64encode(smoke_images[0]).decode()}
        result = predictor_server.post("/v1/models/embedding:predict", json={"instances": [instance, good]}).json()
        assert result["predictions"][0]["code"] == 400
        assert_same(result["predictions"][1:], local_predictions[:1])

    def test_large_and_small_images_keep_their_order(
        self, each_server: Server, smoke_images: list[bytes], local_predictions: list[dict[str, Any]]
    ) -> None:
        large = hostile.png(1001, 1000, 1)
        result = each_server.predict([large, smoke_images[0], b"", large, *smoke_images[1:]]).json()["predictions"]
        assert_same([result[1], *result[4:]], local_predictions)
        assert_same([result[0]], [result[3]])

    def test_v1_request_of_bad_images_only_is_400(self, each_server: Server) -> None:
        response = each_server.predict([BAD, b""])
        assert (response.status_code, response.json()) == (400, {"error": IMAGE_SENTENCE})

    def test_v2_bad_image_fails_the_request(self, each_server: Server, smoke_images: list[bytes]) -> None:
        sentence = f"Image 2 of 3 cannot be answered: {IMAGE_SENTENCE}"
        batch = [smoke_images[0], BAD, smoke_images[1]]
        response = each_server.infer(files(batch))
        assert (response.status_code, response.json()) == (400, {"error": sentence})
        with pytest.raises(grpc.RpcError) as exc_info:
            each_server.infer_grpc("images", "BYTES", [3], bytes_contents=batch)
        assert (exc_info.value.code(), exc_info.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, sentence)


class TestBadRequests:
    @pytest.mark.parametrize(
        "body",
        [b"", b"{", b"[1]", b'"x"', b"null", b'{"instances": 1}', b'{"a":' * 50_000, b'{"instances"\xff'],
    )
    @pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8", "image/png"])
    def test_invalid_v1_request_is_400(self, each_server: Server, body: bytes, content_type: str) -> None:
        response = each_server.post(
            "/v1/models/embedding:predict", content=body, headers={"Content-Type": content_type}
        )
        assert response.status_code == 400
        assert response.json()["error"].endswith(".")

    @pytest.mark.parametrize(
        "tensor",
        [
            {"name": "images", "datatype": "BYTES", "shape": [2], "data": ["AAAA"]},
            {"name": "images", "datatype": "BYTES", "shape": [-1], "data": ["AAAA"]},
            {"name": "images", "datatype": "BYTES", "shape": [1, 1], "data": ["AAAA"]},
            {"name": "images", "datatype": "BYTES", "shape": [], "data": ["AAAA"]},
            {"name": "images", "datatype": "BYTES", "shape": [1], "data": [10**12]},
            {"name": "images", "datatype": "BYTES", "shape": [1], "data": [None]},
            {"name": "images", "datatype": "FP32", "shape": [1], "data": [1.0]},
            {"name": "other", "datatype": "BYTES", "shape": [1], "data": ["AAAA"]},
            {"name": "pixels", "datatype": "UINT8", "shape": [1, 9, 8, 1], "data": [0] * 72},
            {"name": "pixels", "datatype": "UINT8", "shape": [1, 1, 8, 8], "data": [0] * 64},
            {"name": "pixels", "datatype": "UINT8", "shape": [-1, 8, 8, 1], "data": [0] * 64},
            {"name": "pixels", "datatype": "UINT8", "shape": [1, 8, 8, 1], "data": [0] * 63},
            {"name": "pixels", "datatype": "UINT8", "shape": [1, 8, 8, 1], "data": [256] * 64},
            {"name": "pixels", "datatype": "UINT8", "shape": [1, 8, 8, 1], "data": [-1] * 64},
            {"name": "pixels", "datatype": "UINT8", "shape": [1, 8, 8, 1], "data": [0.5] * 64},
            {"name": "pixels", "datatype": "UINT8", "shape": [1, 8, 8, 1], "data": ["a"] * 64},
            {"name": "pixels", "datatype": "UINT8", "shape": [1, 8, 8, 1], "data": [[0], [0, 1]]},
        ],
    )
    def test_unexpected_tensor_is_400(self, predictor_server: Server, tensor: dict[str, Any]) -> None:
        response = predictor_server.infer(tensor)
        assert response.status_code == 400
        assert response.json()["error"].endswith(".")

    @pytest.mark.parametrize(
        ("shape", "raw"), [([2], b"\x00\x00\x00\x00"), ([1], b"\xff\xff\xff\xffabc"), ([1], b"abc"), ([-1], b"")]
    )
    def test_broken_binary_data_is_an_invalid_argument(self, each_server: Server, shape: list[int], raw: bytes) -> None:
        with pytest.raises(grpc.RpcError) as exc_info:
            each_server.infer_grpc("images", "BYTES", shape, raw=raw)
        assert exc_info.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    def test_message_that_is_none_is_an_invalid_argument(self, each_server: Server) -> None:
        with pytest.raises(grpc.RpcError) as exc_info:
            each_server.grpc("ModelInfer", b"\xff\xff", "ModelInferResponse")
        assert exc_info.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert exc_info.value.details() == "The message is no inference.ModelInferRequest."

    @pytest.mark.parametrize("length", ["5", "-1", "x", "99999", "9" * 5000])
    def test_wrong_size_of_the_json_before_binary_data_is_400(self, each_server: Server, length: str) -> None:
        response = each_server.post(
            "/v2/models/embedding/infer",
            content=json.dumps({"inputs": [files([b"x"])]}).encode(),
            headers={"Inference-Header-Content-Length": length, "Content-Type": "application/octet-stream"},
        )
        assert response.status_code == 400
        assert length == "5" or response.json()["error"].endswith("content-length does not fit the body.")

    @pytest.mark.parametrize(
        ("size", "data"), [(5, b""), (1, b"ab"), (-1, b""), ("4", b"abcd"), (4, b"abcd"), (8, b"\xff\0\0\0abcd")]
    )
    def test_binary_data_that_do_not_fit_their_tensor_are_400(
        self, each_server: Server, size: object, data: bytes
    ) -> None:
        response = infer_in_binary(each_server, {"binary_data_size": size}, data)
        assert response.status_code == 400
        assert response.json()["error"].endswith(".")


def infer_in_binary(server: Server, parameters: dict[str, Any], data: bytes, **request: Any) -> httpx.Response:
    tensor = {"name": "images", "datatype": "BYTES", "shape": [1], "parameters": parameters}
    head = json.dumps({"inputs": [tensor], **request}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return server.post("/v2/models/embedding/infer", content=head + data, headers=headers)


class TestLimits:
    def test_oversized_body_is_413(self, each_server: Server) -> None:
        sentence = {"error": "The request is larger than the limit of 6553500 bytes."}
        for path in ("/v1/models/embedding:predict", "/v2/models/embedding/infer"):
            with closing(http.client.HTTPConnection("127.0.0.1", each_server.http_port, timeout=60)) as connection:
                connection.putrequest("POST", path)
                connection.putheader("Content-Length", "6553501")
                connection.endheaders()  # and not a byte more
                response = connection.getresponse()
                assert (response.status, json.load(response)) == (413, sentence)
            with closing(http.client.HTTPConnection("127.0.0.1", each_server.http_port, timeout=60)) as connection:
                connection.putrequest("POST", path)
                connection.putheader("Transfer-Encoding", "chunked")
                connection.endheaders()
                connection.send(b"%x\r\n%s\r\n" % (6_553_501, bytes(6_553_501)))  # and not the last chunk
                response = connection.getresponse()
                assert (response.status, json.load(response)) == (413, sentence)
        with pytest.raises(grpc.RpcError) as exc_info:
            each_server.infer_grpc("images", "BYTES", [1], bytes_contents=[b" " * 7_000_000])
        assert exc_info.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED

    def test_too_many_images_are_413(self, each_server: Server) -> None:
        for response in (each_server.predict([b""] * 1025), each_server.infer(files([b""] * 1025))):
            assert response.status_code == 413
            assert response.json() == {"error": "The request has 1025 images; the limit is 1024."}

    def test_too_many_pixels_together_are_413(self, each_server: Server) -> None:
        largest = hostile.png(5_000, 5_000, 1)
        sentence = {"error": "The images of the request have more than 100000000 pixels together; send fewer."}
        for response in (each_server.predict([largest] * 5), each_server.infer(files([largest] * 5))):
            assert (response.status_code, response.json()) == (413, sentence)
        with pytest.raises(grpc.RpcError) as exc_info:
            each_server.infer_grpc("images", "BYTES", [5], bytes_contents=[largest] * 5)
        assert exc_info.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED

    @pytest.mark.parametrize(
        "body",
        [b'{"inputs": [' + b"{}," * 2_000_000 + b"{}]}", b'{"inputs": [' + b"1," * 3_000_000 + b"1]}"],
    )
    def test_millions_of_errors_in_a_request_cost_as_little_as_one(self, each_server: Server, body: bytes) -> None:
        assert each_server.process is not None
        for path in ("/v2/models/embedding/infer", "/v2/models/embedding/versions/1/infer"):
            response = each_server.post(path, content=body)
            assert response.status_code == 400
            assert len(response.json()["error"]) < 300
        # KServe's own parser took 3 GB.
        status = Path(f"/proc/{each_server.process.pid}/status").read_text()
        peak_bytes = int(status.partition("VmHWM:")[2].split()[0]) * 1024
        assert peak_bytes < 1.5 * 2**30

    def test_millions_of_tensors_are_an_invalid_argument(self, each_server: Server) -> None:
        for many in ({"inputs": [{}] * 1_000_000}, {"outputs": [{}] * 1_000_000}):
            with pytest.raises(grpc.RpcError) as exc_info:
                each_server.grpc(
                    "ModelInfer",
                    open_inference_pb2.ModelInferRequest(model_name="embedding", **many),
                    "ModelInferResponse",
                )
            assert exc_info.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "more than 64 inputs or outputs" in exc_info.value.details()

    def test_model_cannot_be_unloaded(self, each_server: Server, smoke_images: list[bytes]) -> None:
        for verb in ("load", "unload"):
            response = each_server.post(f"/v2/repository/models/embedding/{verb}")
            assert response.status_code == 404
        request = open_inference_pb2.ServerLiveRequest()
        with pytest.raises(grpc.RpcError) as exc_info:
            each_server.grpc("RepositoryModelUnload", request, "ServerLiveResponse")
        assert exc_info.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert each_server.predict(smoke_images).status_code == 200

    def test_listens_on_loopback_or_its_host_only(self, each_server: Server) -> None:
        connections = psutil.Process(each_server.process.pid).net_connections("inet")
        addresses = [c.laddr for c in connections if c.status == psutil.CONN_LISTEN]
        listeners = {(address.ip.removeprefix("::ffff:"), address.port) for address in addresses}
        assert listeners == {(each_server.host, each_server.http_port), (each_server.host, each_server.grpc_port)}

    def test_serves_no_page_that_loads_scripts(self, each_server: Server) -> None:
        assert each_server.get("/docs").status_code == 404


class TestOperation:
    def test_metadata_names_the_release(self, each_server: Server, release: PackedRelease) -> None:
        result = each_server.get("/v2/models/embedding").json()
        assert result["versions"] == [release.version]
        assert {"name": "images", "datatype": "BYTES", "shape": [-1]} in result["inputs"]
        assert [output["name"] for output in result["outputs"]][:3] == ["pred", "dist", "unknown"]

    def test_metrics_count_images_and_name_the_release(self, each_server: Server, release: PackedRelease) -> None:
        def refused() -> float:
            lines = each_server.get("/metrics").text.splitlines()
            named = [
                line for line in lines if 'evernear_images_total{model_name="embedding",outcome="refused"}' in line
            ]
            return float(named[0].split()[-1]) if named else 0

        before = refused()
        each_server.predict([BAD])
        assert refused() == before + 1
        text = each_server.get("/metrics").text
        (info,) = [line for line in text.splitlines() if line.startswith("evernear_release_info{")]
        assert f'version="{release.version}"' in info
        assert 'request_predict_seconds_count{model_name="embedding"}' in text

    def test_predictor_names_the_engine_of_its_network(self, predictor_server: Server, release: PackedRelease) -> None:
        engine = "OpenVINO" if openvino_version() else "TorchScript"
        labels = f'engine="{engine}",model_name="embedding",version="{release.version}"'
        assert f"evernear_release_info{{{labels}}} 1.0" in predictor_server.get("/metrics").text

    def test_requests_beside_predictions(self, each_server: Server, release: PackedRelease) -> None:
        assert each_server.get("/v1/models").json() == {"models": ["embedding"]}
        head = each_server.request("HEAD", "/health")
        assert (head.status_code, head.content) == (200, b"")
        assert each_server.get("/v2/models/embedding/infer").status_code == 405
        assert each_server.post("/v1/models/embedding/x:predict").status_code == 404
        assert each_server.get("/v2/health/live").json() == {"live": True}
        assert each_server.get("/v2/health/ready").json() == {"ready": True}
        for path in ("/v1/models/embedding", f"/v2/models/embedding/versions/{release.version}/ready"):
            assert each_server.get(path).json() == {"name": "embedding", "ready": True}

    def test_each_method_over_grpc(self, each_server: Server, release: PackedRelease) -> None:
        assert each_server.grpc("ServerLive", open_inference_pb2.ServerLiveRequest(), "ServerLiveResponse").live
        assert each_server.grpc("ServerReady", open_inference_pb2.ServerReadyRequest(), "ServerReadyResponse").ready
        model = open_inference_pb2.ModelReadyRequest(name="embedding", version=release.version)
        assert each_server.grpc("ModelReady", model, "ModelReadyResponse").ready
        metadata = each_server.grpc(
            "ServerMetadata", open_inference_pb2.ServerMetadataRequest(), "ServerMetadataResponse"
        )
        assert metadata.name == "evernear"
        request = open_inference_pb2.ModelMetadataRequest(name="embedding")
        described = each_server.grpc("ModelMetadata", request, "ModelMetadataResponse")
        assert list(described.versions) == [release.version]
        assert [output.name for output in described.outputs][:2] == ["pred", "dist"]

    def test_images_are_also_recognized_as_files_and_in_json(
        self, each_server: Server, smoke_images: list[bytes], local_predictions: list[dict[str, Any]]
    ) -> None:
        answer = each_server.post("/predict", content=smoke_images[0], headers={"Content-Type": "image/png"})
        assert_same([answer.json()], local_predictions[:1])
        body = {"data": base64.b64encode(smoke_images[0]).decode()}
        assert each_server.post("/predict/label", json=body).json()["label"] == local_predictions[0]["pred"]
        assert each_server.get("/predict/test/label").json()["label"] == local_predictions[0]["pred"]
        assert each_server.post("/predict", json={"data": "AAAA"}).json()["code"] == 400

    def test_unknown_model_or_version_is_404(self, each_server: Server, smoke_images: list[bytes]) -> None:
        assert each_server.post("/v1/models/other:predict", json={"instances": []}).status_code == 404
        body = {"inputs": [files(smoke_images)]}
        assert each_server.post("/v2/models/embedding/versions/1/infer", json=body).status_code == 404
        request = open_inference_pb2.ModelMetadataRequest(name="other")
        with pytest.raises(grpc.RpcError) as exc_info:
            each_server.grpc("ModelMetadata", request, "ModelMetadataResponse")
        assert exc_info.value.code() == grpc.StatusCode.NOT_FOUND

    @pytest.mark.slow
    def test_hanging_predictor_is_504(self, service: dict[str, Server], smoke_images: list[bytes]) -> None:
        transformers = [server for name, server in service.items() if name != "predictor"]
        assert all(server.predict(smoke_images).status_code == 200 for server in transformers)  # connected
        with service["predictor"].frozen(), ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda server: server.predict(smoke_images), transformers))
        for answer in answers:
            assert answer.status_code == 504, answer.text
            assert "within 10 s" in answer.json()["error"]
        assert all(server.predict(smoke_images).status_code == 200 for server in transformers)

    @pytest.mark.slow
    def test_predictor_of_another_release_is_503(
        self,
        service: dict[str, Server],
        release: PackedRelease,
        make_release: MakeRelease,
        smoke_images: list[bytes],
        local_predictions: list[dict[str, Any]],
    ) -> None:
        predictor = service["predictor"]
        transformers = [server for name, server in service.items() if name != "predictor"]
        other = make_release()
        assert predictor.stop() == 0
        try:
            for server in transformers:
                assert_unavailable(server, smoke_images, "No server answers")
            predictor.start("--model_dir", str(other.archive))
            predictor.await_answer("/")
            assert predictor.predict(smoke_images[:1]).json()["predictions"][0]["version"] == other.version
            for server in transformers:
                await_connection(server, smoke_images)
                assert_unavailable(server, smoke_images, f"release {other.version}, but images are prepared for")
        finally:
            predictor.stop()
            predictor.start()
            predictor.await_answer("/")
        for server in transformers:
            await_connection(server, smoke_images)
            assert server.get("/v2/models/embedding/ready").status_code == 200
            assert_same(server.predict(smoke_images).json()["predictions"], local_predictions)


SIGNALLED_AT_START = """
import os, signal
from evernear.serving.http import __main__ as program, app

create_app = app._create_app

def signalled(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    return create_app(*arguments)

app._create_app = signalled
program.main()
"""


class TestShutdown:
    def test_signal_before_the_first_request_ends_the_server(self, release: PackedRelease) -> None:
        ports = [f"--{name}_port={port}" for name, port in zip(("http", "grpc"), free_ports(2), strict=True)]
        command = [sys.executable, "-c", SIGNALLED_AT_START, f"--model_dir={release.archive.parent}", *ports]
        assert subprocess.run(command, timeout=READY_TIMEOUT_S).returncode == 0

    def test_grpc_stops_together_with_rest(
        self, release: PackedRelease, tmp_path: Path, smoke_images: list[bytes]
    ) -> None:
        """Otherwise a server that waits for both takes longer than its pod's grace period."""
        server = Server(tmp_path / "log", "--model_dir", str(release.archive.parent))
        server.start()
        server.await_answer("/")
        with closing(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)) as connection:
            connection.putrequest("POST", "/v1/models/embedding:predict")
            connection.putheader("Content-Length", "1000")
            connection.endheaders()  # a request in flight, for which REST waits
            assert not refuses_grpc(server, smoke_images)
            with ThreadPoolExecutor() as pool:
                ended = pool.submit(server.stop)
                until(lambda: refuses_grpc(server, smoke_images))
                connection.send(b" " * 1000)
                assert connection.getresponse().status == 400, "REST still answers"
                assert ended.result() == 0


def refuses_grpc(server: Server, images: list[bytes]) -> bool:
    try:
        server.infer_grpc("images", "BYTES", [1], bytes_contents=images[:1])
    except grpc.RpcError as error:
        return error.code() == grpc.StatusCode.UNAVAILABLE
    return False


def await_connection(server: Server, images: list[bytes]) -> None:
    """Reconnects within seconds of the predictor's return, not after gRPC's two minutes."""
    deadline_s = time.monotonic() + 30
    while "No server answers" in server.predict(images).text:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)


def assert_unavailable(server: Server, images: list[bytes], reason: str) -> None:
    for path in ("/v2/health/ready", "/v2/models/embedding/ready", "/v1/models/embedding"):
        assert server.get(path).status_code == 503, path
    for response in (server.predict(images), server.infer(files(images))):
        assert response.status_code == 503
        assert reason in response.json()["error"]
    with pytest.raises(grpc.RpcError) as exc_info:
        server.infer_grpc("images", "BYTES", [1], bytes_contents=images[:1])
    assert exc_info.value.code() == grpc.StatusCode.UNAVAILABLE
    assert reason in exc_info.value.details()


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--batch_size=0", "--batch_size: '0' is not a number of at least 1"),
        ("--large_decodes=x", "--large_decodes: 'x' is not a number of at least 1"),
        ("--max_request_size_bytes=2147483648", "'2147483648' is not a number from 1 to 2147483647"),
        ("--predictor_request_retries=-1", "--predictor_request_retries: '-1' is not a number of at least 0"),
        ("--upload_timeout_seconds=nan", "'nan' is not a number from 0.001 to 3600.0"),
        ("--http_port=99999", "--http_port: '99999' is not a number from 1 to 65535"),
        ("--predictor_host=http://127.0.0.1:9081", "'http://127.0.0.1:9081' is not HOST or HOST:PORT"),
        ("--predictor_host=a:b:c", "'a:b:c' is not HOST or HOST:PORT"),
        ("--ssl_certfile=none.pem", "--ssl_certfile = none.pem cannot be read: No such file or directory."),
        (f"--ssl_certfile={__file__}", "--ssl_certfile and --ssl_keyfile cannot be used ("),
        (f"--ssl_keyfile={__file__}", f"--ssl_keyfile = {__file__} needs --ssl_certfile."),
    ],
)
def test_unusable_argument_is_one_sentence(argument: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, SettingsError)) as ended:
        serve_container(arguments().parse_args([argument]))
    assert sentence in capsys.readouterr().err + str(ended.value)


@pytest.mark.slow
def test_startup_errors_are_one_sentence(
    release: PackedRelease, champion_store: str, service: dict[str, Server], tmp_path_factory: pytest.TempPathFactory
) -> None:
    empty = tmp_path_factory.mktemp("empty")
    broken = tmp_path_factory.mktemp("broken") / "release.mar"
    broken.write_bytes(release.archive.read_bytes()[:-100])
    running, version = service["predictor"], "20260101.000000.00000000"
    port = str(running.http_port)
    starts = [
        (3, "has 0 release archives", ["--model_dir", str(empty)]),
        (3, "none does not exist; name one with --model_dir", ["--model_dir", str(empty / "none")]),
        (3, "release.mar is not a release", ["--model_dir", str(broken)]),
        (4, f"No release has been promoted in {empty.as_uri()} yet", ["--store", empty.as_uri()]),
        (4, f"Release {version} does not exist", ["--store", champion_store, "--release", version]),
        (
            4,
            f"Port {port} on 127.0.0.1 is in use",
            [*("--store", champion_store, "--predictor_host", "127.0.0.1", "--http_port", port), "--enable_grpc=false"],
        ),
        (2, "unrecognized arguments: --modeldir", ["--modeldir", str(empty)]),
        (2, "invalid choice: '2'", ["--enable_grpc", "2"]),
    ]
    for code, sentence, words in starts:
        command = [sys.executable, "-m", "evernear.serving.http", *words]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ended.returncode == code, ended.stderr
        assert sentence in ended.stderr
        assert "Traceback" not in ended.stderr
    assert running.get("/").status_code == 200


def test_transformer_loads_no_torch(transformer: Server) -> None:
    assert transformer.process is not None
    libraries = {Path(mapping.path).name for mapping in psutil.Process(transformer.process.pid).memory_maps()}
    assert not [name for name in libraries if "torch" in name or "faiss" in name]


def test_short_list_of_neighbors_is_filled_up_and_read_without_the_filling() -> None:
    near = (Neighbor(label="7", dist=0.5, row=3), Neighbor(label="1", dist=0.75, row=0))
    predictions = [
        Prediction(pred="7", dist=0.5, unknown=False, neighbors=near[:count], version="v") for count in (2, 1)
    ]
    rest = open_inference.parse_rest(b'{"inputs": [], "parameters": {"binary_data_output": true}}', None)
    body, head_size = open_inference.rest_response(rest, "embedding", "v", predictions)
    assert open_inference.predictions_of_rest(body, str(head_size)) == predictions
    body, head_size = open_inference.rest_response(
        open_inference.parse_rest(b'{"inputs": []}', None), "m", "v", predictions
    )
    assert head_size is None
    assert open_inference.predictions_of_rest(body, None) == predictions


@pytest.mark.slow
@pytest.mark.parametrize("name", ["predictor", "grpc-v2"])
def test_survives_a_minute_of_fuzzing_without_5xx(
    service: dict[str, Server], smoke_images: list[bytes], local_predictions: list[dict[str, Any]], name: str
) -> None:
    assert fuzz(kserve(service[name].http_port, smoke_images[0], local_predictions[0]["pred"]), seconds=60) > 100


@pytest.mark.parametrize("protocol", TRACED)
def test_prediction_is_one_trace_through_both_containers(
    service: dict[str, Server], collector: Collector, smoke_images: list[bytes], release: PackedRelease, protocol: str
) -> None:
    trace = f"{TRACED.index(protocol) + 1:032x}"
    assert service[protocol].predict(smoke_images[:1], **parent(trace)).status_code == 200
    called = "gRPC ModelInfer" if protocol == "grpc-v2" else "POST /v1/models/{model}:predict"
    transformer, predictor = "evernear-transformer", "evernear-predictor"
    received = collector.wait_for(
        trace,
        f"{transformer} POST /v1/models/{{model}}:predict",
        *(f"{transformer} {name}" for name in ("prepare", "call predictor")),
        *(f"{predictor} {name}" for name in (called, "decode", "recognize")),
    )
    request = received[f"{transformer} POST /v1/models/{{model}}:predict"][1]
    prepare, call = (received[f"{transformer} {name}"][1] for name in ("prepare", "call predictor"))
    answer, decode, recognize = (received[f"{predictor} {name}"][1] for name in (called, "decode", "recognize"))
    assert request.parent_span_id.hex() == CLIENT_SPAN
    assert prepare.parent_span_id == call.parent_span_id == request.span_id
    assert answer.parent_span_id == call.span_id
    assert decode.parent_span_id == recognize.parent_span_id == answer.span_id
    assert attributes(request)["evernear.release"] == attributes(answer)["evernear.release"] == release.version


def test_predictor_alone_is_a_trace(predictor_server: Server, collector: Collector, smoke_images: list[bytes]) -> None:
    trace, name = "f" * 32, "POST /v1/models/{model}:predict"
    assert predictor_server.predict(smoke_images[:1], **parent(trace)).status_code == 200
    (_, predict) = collector.wait_for(trace, name, "recognize")[name]
    assert predict.parent_span_id.hex() == CLIENT_SPAN
    assert attributes(predict)["http.response.status_code"] == 200
    rejected = "e" * 32
    assert predictor_server.predict([BAD], **parent(rejected)).status_code == 400
    (_, predict) = collector.wait_for(rejected, name)[name]
    assert attributes(predict)["http.response.status_code"] == 400


def test_requests_are_logged_only_if_asked_for(service: dict[str, Server], smoke_images: list[bytes]) -> None:
    quiet, logging = service["v2"], service["v1"]  # see V1_LOGGING
    for server in (quiet, logging):
        assert server.predict(smoke_images[:1]).status_code == 200
    line = "POST /v1/models/{model}:predict: 200"
    assert line not in quiet.log.read_text()
    assert line in logging.log.read_text()
