"""Run a network on the CPU with OpenVINO, which needs about 0.6 times the time of TorchScript.

OpenVINO's converter would report each import and conversion to its maker, so this module loads only
the parts that it needs, without ``openvino-telemetry``.
"""

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from evernear.common.processes import chosen_threads, last_line
from evernear.embedding import OPENVINO_MODEL_FILE, OPENVINO_WEIGHTS_FILE, openvino_version
from evernear.embedding.network import Network, freeze_parameters, ignore_torchscript_deprecation

if TYPE_CHECKING:
    import openvino

_UNLIMITED = 2**31 - 1
_DIVIDED_PIXELS = 64 * 64
"""The size of an image, in pixels, from which several threads share a call. For smaller images, a
second thread doubles the CPU time and does not shorten the call."""


def cache_key(identity: str, tried: bool = True) -> str:
    """The folder of the cached vectors of a network, which each engine rounds differently.
    ``tried`` is false if the network was exported without OpenVINO. A version of OpenVINO can
    always run a network or never, so its folder never has vectors of both engines."""
    installed = openvino_version()
    return f"{identity}/openvino-{installed}" if tried and installed else identity


class OpenVINONetwork:
    """``model`` has an input uint8 (N, H, W, C), and one output or more, of which this network has
    number ``output``. It may be called from ``streams`` threads at a time, which share the CPUs."""

    def __init__(self, model: "openvino.Model", max_batch_size: int, streams: int = 1, output: int = 0) -> None:
        _, height, width, _ = model.input().partial_shape
        is_small = height.get_length() * width.get_length() < _DIVIDED_PIXELS
        options: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": max(streams, 1 if is_small else chosen_threads()),
            "NUM_STREAMS": streams,
            "ENABLE_CPU_PINNING": False,  # the threads of several processes would share the same CPUs
        }
        self._compiled = _core().compile_model(model, "CPU", options)
        self._max_batch_size, self._output = max_batch_size, output
        self._tensor = _import_openvino().Tensor
        self._of_thread = threading.local()

    def __call__(self, images: Tensor) -> Tensor:
        if len(images) <= self._max_batch_size:
            return self._infer(images)
        return torch.cat([self._infer(part) for part in images.split(self._max_batch_size)])

    def _infer(self, images: Tensor) -> Tensor:
        request = getattr(self._of_thread, "request", None)
        if request is None:
            request = self._of_thread.request = self._compiled.create_infer_request()
        pixels = images.permute(0, 2, 3, 1).contiguous()  # no copy of images in the memory format channels-last
        shared = self._tensor(pixels.numpy(), shared_memory=True)
        # The outputs share the request's memory, which the next call overwrites.
        return torch.from_numpy(request.infer(shared, share_outputs=True)[self._output].copy())


def read_openvino(directory: Path, max_batch_size: int, streams: int = 1, output: int = 0) -> OpenVINONetwork:
    """Load what `convert` wrote. The caller must have verified the files."""
    model = _core().read_model(directory / OPENVINO_MODEL_FILE, directory / OPENVINO_WEIGHTS_FILE)
    return OpenVINONetwork(model, max_batch_size, streams, output)


def convert(network: nn.Module, images: Tensor) -> "openvino.Model":
    """Convert an eager network in eval mode, for batches of any size. ``images`` (N, C, H, W), at
    least one, are an example.

    Raises:
        RuntimeError: the network has an operation that OpenVINO lacks.
    """
    example = images[:1].expand(2, -1, -1, -1).contiguous()  # a batch of one would become a constant
    with unsplit(network), torch.inference_mode(mode=False), torch.no_grad():
        with ignore_torchscript_deprecation():
            traced = torch.jit.trace(network, example, check_trace=False)
        try:
            return _convert_traced(traced, example)
        except Exception as error:  # OpenVINO's have no common base
            raise RuntimeError(last_line(str(error))) from error


def _convert_traced(traced: Any, example: Tensor) -> "openvino.Model":
    openvino = _import_openvino()
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    decoder: Any = TorchScriptPythonDecoder(traced, example_input=example)
    frontend = FrontEndManager().load_by_framework("pytorch")
    model = frontend.convert(frontend.load(decoder))
    model.reshape([-1, *example.shape[1:]])
    preprocessing = openvino.preprocess.PrePostProcessor(model)
    preprocessing.input().tensor().set_layout(openvino.Layout("NHWC"))
    preprocessing.input().model().set_layout(openvino.Layout("NCHW"))
    return preprocessing.build()


def save(model: "openvino.Model", directory: Path) -> None:
    _import_openvino().save_model(model, directory / OPENVINO_MODEL_FILE, compress_to_fp16=False)


def compile_network(network: nn.Module, shape: tuple[int, int, int], streams: int) -> Network:
    """Prepare ``network`` for inference in this process, as if it were exported and loaded."""
    if openvino_version():
        with suppress(RuntimeError), unsplit(network) as size:
            height, width, channels = shape
            images = torch.zeros((1, channels, height, width), dtype=torch.uint8)
            return OpenVINONetwork(convert(network, images), size, streams)
    return freeze_parameters(network)


@contextmanager
def unsplit(network: nn.Module) -> Generator[int]:
    """A context in which ``network`` does not split batches. Yields the size to split them at."""
    modules: list[Any] = [module for module in network.modules() if hasattr(module, "max_batch_size")]
    limits: list[int] = [module.max_batch_size for module in modules]
    for module in modules:
        module.max_batch_size = _UNLIMITED
    try:
        yield min(limits, default=_UNLIMITED)
    finally:
        for module, limit in zip(modules, limits, strict=True):
            module.max_batch_size = limit


@cache
def _core() -> "openvino.Core":
    return _import_openvino().Core()


def _import_openvino() -> Any:
    sys.modules.setdefault("openvino_telemetry", None)  # pyright: ignore[reportArgumentType] - cannot be imported
    import openvino

    return openvino
