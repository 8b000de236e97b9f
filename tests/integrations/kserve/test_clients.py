"""The clients of Triton and of KServe get the predictions of `Predictor`, from both servers."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from evernear.release.archive_reader import ReleaseParts
from evernear.serving.core import Predictor
from tests import ROOT
from tests.integrations.kserve.inference_service import Server

PYTHON = ROOT / ".venv/clients/bin/python"
CLIENTS = Path(__file__).with_name("clients.py")
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("client", ["triton", "kserve"])
@pytest.mark.parametrize("name", ["predictor", "grpc-v2"])
def test_clients_get_the_predictions(
    service: dict[str, Server], parts: ReleaseParts, tmp_path: Path, client: str, name: str
) -> None:
    if not PYTHON.exists():
        reason = "the clients are not installed; `make .venv/clients/.installed` installs them"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    server = service[name]
    images = [image for image, _ in parts.smoke_queries()[:2]]
    for number, image in enumerate(images):
        (tmp_path / f"{number}.png").write_bytes(image)
    arguments = [client, server.url, f"127.0.0.1:{server.grpc_port}", parts.manifest.version]
    command = [PYTHON, CLIENTS, *arguments, *sorted(tmp_path.glob("*.png"))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    received = json.loads(ended.stdout)
    expected = columns_of([answer.model_dump() for answer in Predictor.open(parts).predict(images)])
    assert len(received) == 4
    for protocol, answer in received.items():
        columns = columns_of(answer) if isinstance(answer, list) else answer
        assert columns.keys() == expected.keys(), protocol
        for column, values in expected.items():
            approximate = "dist" in column
            assert columns[column] == (
                pytest.approx(values, abs=1e-4)
                if approximate and column == "dist"
                else [pytest.approx(row, abs=1e-4) for row in values]
                if approximate
                else values
            ), (protocol, column)


def columns_of(predictions: list[dict[str, Any]]) -> dict[str, list[Any]]:
    columns = {name: [answer[name] for answer in predictions] for name in ("pred", "dist", "unknown", "version")}
    for name in ("label", "dist", "row"):
        columns[f"neighbor_{name}s"] = [[near[name] for near in answer["neighbors"]] for answer in predictions]
    return columns
