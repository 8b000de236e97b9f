"""The clients of Triton and of KServe, for `test_clients`.

``clients.py triton|kserve URL GRPC_ADDRESS VERSION IMAGE...`` prints the predictions as JSON. One
process cannot import both, whose protobuf messages have the same names.
"""

import asyncio
import base64
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

MODEL = "embedding"
OUTPUTS = ("pred", "dist", "unknown", "version", "neighbor_labels", "neighbor_dists", "neighbor_rows")
Columns = dict[str, list[Any]]


def triton(url: str, grpc_address: str, version: str, images: Sequence[bytes]) -> dict[str, Columns]:
    """Binary tensors are the default over REST, and the only ones over gRPC."""
    found: dict[str, Columns] = {}
    for name, address in (("http", url.removeprefix("http://")), ("grpc", grpc_address)):
        api = importlib.import_module(f"tritonclient.{name}")
        client = api.InferenceServerClient(address)
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(MODEL)
        assert "evernear" in str(client.get_server_metadata())
        assert all(output in str(client.get_model_metadata(MODEL, version)) for output in OUTPUTS)
        tensor = api.InferInput("images", [len(images)], "BYTES")
        tensor.set_data_from_numpy(np.array(images, np.object_))
        found[name] = triton_columns(client.infer(MODEL, [tensor], model_version=version))
        if name == "http":
            outputs = [api.InferRequestedOutput(output, binary_data=output == "dist") for output in OUTPUTS]
            found["http, outputs in JSON and binary"] = triton_columns(client.infer(MODEL, [tensor], outputs=outputs))
            encoded = np.array([base64.b64encode(image) for image in images], np.object_)
            tensor.set_data_from_numpy(encoded, binary_data=False)
            found["http, input in JSON"] = triton_columns(client.infer(MODEL, [tensor]))
        client.close()
    return found


def triton_columns(result: Any) -> Columns:
    return {name: listed(result.as_numpy(name)) for name in OUTPUTS}


async def kserve(url: str, grpc_address: str, version: str, images: Sequence[bytes]) -> dict[str, Any]:
    from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
    from kserve.inference_client import RESTConfig

    encoded = [base64.b64encode(image).decode() for image in images]
    v1, v2 = (InferenceRESTClient(RESTConfig(protocol=protocol)) for protocol in ("v1", "v2"))
    assert await v1.is_server_live(url)
    assert await v1.is_model_ready(url, MODEL)
    answer = await v1.infer(url, {"instances": [{"data": image} for image in encoded]}, model_name=MODEL)
    assert await v2.is_server_ready(url)
    assert await v2.is_model_ready(url, MODEL)
    in_json = InferInput("images", [len(images)], "BYTES")
    in_json.set_data_from_numpy(np.array(encoded, np.object_), binary_data=False)
    rest = await v2.infer(url, InferRequest(MODEL, [in_json]), model_name=MODEL)
    async with InferenceGRPCClient(grpc_address) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready(MODEL)
        listed_input = InferInput("images", [len(images)], "BYTES", list(images))
        rpc = await client.infer(InferRequest(MODEL, [listed_input]))
        raw_input = InferInput("images", [len(images)], "BYTES")
        raw_input.set_data_from_numpy(np.array(images, np.object_), binary_data=True)
        raw = await client.infer(InferRequest(MODEL, [raw_input]))
    return {
        "v1": answer["predictions"],
        **{name: kserve_columns(response) for name, response in (("v2", rest), ("gRPC", rpc), ("gRPC, raw", raw))},
    }


def kserve_columns(response: Any) -> Columns:
    return {output.name: listed(output.as_numpy()) for output in response.outputs}


def listed(array: Any) -> list[Any]:
    texts = [value.decode() if isinstance(value, bytes) else value for value in array.ravel().tolist()]
    return np.array(texts, np.object_).reshape(array.shape).tolist()


def main(client: str, url: str, grpc_address: str, version: str, *names: str) -> None:
    arguments = (url, grpc_address, version, [Path(name).read_bytes() for name in names])
    print(json.dumps(triton(*arguments) if client == "triton" else asyncio.run(kserve(*arguments))))


main(*sys.argv[1:])
