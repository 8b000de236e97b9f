"""OpenVINO's form of an exported network: the same vectors, and no message to its maker."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from evernear.common.processes import available_cpus
from evernear.data.shards import Dataset
from evernear.embedding import OPENVINO_FILES, export
from evernear.embedding.data_loader import to_tensor
from evernear.embedding.engine import OpenVINONetwork, compile_network, convert
from evernear.embedding.export import describe_network, load_network
from evernear.embedding.network import load_torchscript
from evernear.errors import IntegrityError

pytest.importorskip("openvino")


@pytest.fixture
def image_batch(digits: Dataset) -> Tensor:
    return to_tensor(next(digits.blocks("test", 70)).images)


@pytest.fixture
def expected(image_batch: Tensor, network_dir: Path) -> Tensor:
    with torch.inference_mode():
        return load_torchscript(network_dir / "network.pt")(image_batch)


def without_openvino(patch: pytest.MonkeyPatch) -> None:
    for module in ("evernear.embedding.export", "evernear.embedding.engine", "evernear.release.manifest"):
        patch.setattr(f"{module}.openvino_version", lambda: "")


@torch.inference_mode()
@pytest.mark.parametrize("limit", [None, 16])
def test_openvino_answers_as_torchscript_for_any_batch(
    limit: int | None, image_batch: Tensor, expected: Tensor, network_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = describe_network(network_dir)
    assert described.openvino is not None
    assert described.openvino.parity_max_abs_difference <= 1e-4
    assert "OpenVINO within" in described.summary()
    network = load_network(network_dir, streams=2)
    assert isinstance(network, OpenVINONetwork)
    if limit:
        monkeypatch.setattr(network, "_max_batch_size", limit)
    for count in (1, 7, 70):
        torch.testing.assert_close(network(image_batch[:count]), expected[:count], atol=1e-5, rtol=0)
    with ThreadPoolExecutor(4) as pool:  # more threads than streams wait
        for vectors in pool.map(network, [image_batch] * 8):
            torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_without_openvino_torchscript_answers_and_vectors_are_cached_apart(
    image_batch: Tensor, expected: Tensor, network_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_openvino = describe_network(network_dir).cache_key
    without_openvino(monkeypatch)
    network = load_network(network_dir)
    assert not isinstance(network, OpenVINONetwork)
    torch.testing.assert_close(network(image_batch), expected, atol=0, rtol=0)
    described = describe_network(network_dir)
    assert described.cache_key == described.identity != with_openvino


def test_network_of_a_machine_without_openvino_says_so(
    digits: Dataset, trained_dir: Path, network_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        without_openvino(patch)
        exported = export.export_network(trained_dir, digits, tmp_path)
    assert exported.summary().endswith("; TorchScript answers, because OpenVINO is not installed")
    assert exported.identity == describe_network(network_dir).identity, "the weights are the identity"
    assert not any((tmp_path / name).exists() for name in OPENVINO_FILES)
    assert not isinstance(load_network(tmp_path), OpenVINONetwork), "as an old release"


class _Unknown(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return torch.special.bessel_j0(images.float().flatten(1))


def test_operation_that_openvino_lacks_is_named_and_torchscript_answers(image_batch: Tensor) -> None:
    with pytest.raises(RuntimeError, match="bessel_j0"):
        convert(_Unknown(), image_batch)
    network = compile_network(_Unknown(), (8, 8, 1), streams=1)
    torch.testing.assert_close(network(image_batch), _Unknown()(image_batch))


class _Sums(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.float().flatten(1).sum(1, keepdim=True)


@pytest.mark.parametrize(("side_px", "threads"), [(63, 1), (64, 2)])
def test_large_images_are_divided_among_threads(side_px: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    network = compile_network(_Sums(), (side_px, side_px, 1), streams=1)
    assert isinstance(network, OpenVINONetwork)
    assert network._compiled.get_property("INFERENCE_NUM_THREADS") == min(threads, available_cpus())


@pytest.mark.parametrize("name", OPENVINO_FILES)
def test_changed_file_is_rejected_before_it_is_parsed(
    name: str, network_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(network_dir, tmp_path / "network")
    data = bytearray((tmp_path / "network" / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "network" / name).write_bytes(data)
    monkeypatch.setattr(export, "read_openvino", lambda *_: pytest.fail("it was parsed"))
    with pytest.raises(IntegrityError, match=rf"{name} is missing or does not match network\.json"):
        load_network(tmp_path / "network")


OFFLINE = """
import os, sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        os.write(2, f"{event} {arguments}".encode())
        os._exit(3)

sys.addaudithook(refuse)
from pathlib import Path
import torch
from evernear.embedding import engine, export
network = export.load_network(Path(sys.argv[1]))
vectors = network(torch.zeros((3, 1, 8, 8), dtype=torch.uint8))
engine.convert(torch.nn.Flatten(), torch.zeros((1, 1, 8, 8)))
assert isinstance(network, engine.OpenVINONetwork)
assert sys.modules["openvino_telemetry"] is None
"""


def test_nothing_leaves_the_machine(network_dir: Path) -> None:
    done = subprocess.run([sys.executable, "-c", OFFLINE, network_dir], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
