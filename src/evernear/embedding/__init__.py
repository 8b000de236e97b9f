"""Train the embedding network with ArcFace, export it as TorchScript and for OpenVINO, and embed
images."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Some virtual machines advertise AMX but raise SIGILL at its first instruction, and oneDNN uses it
# for bfloat16. The variable must be set before oneDNN is first used.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# torch requests huge pages for tensors of 2 MiB or more, which go back to the system after each
# layer: with 4 KiB pages, each next layer would cause hundreds of thousands of page faults per
# second. The variable must be set before the first tensor is created. torch warns on kernels
# without huge pages.
if Path("/sys/kernel/mm/transparent_hugepage").exists():
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

CODE = ("data/shards.py", "embedding")
"""The files and folders whose code trains a network and computes its outputs."""
NETWORK_FILE = "network.pt"
"""The exported network for PyTorch."""
DESCRIPTION_FILE = "network.json"
"""Describes the network in the output of the train step and of the export step."""
OPENVINO_MODEL_FILE, OPENVINO_WEIGHTS_FILE = OPENVINO_FILES = ("network.xml", "network.bin")
"""The exported network for OpenVINO, unless it could not be converted."""


def openvino_version() -> str:
    """Such as "2026.4.1", or an empty string if OpenVINO is not installed."""
    try:
        return version("openvino")
    except PackageNotFoundError:
        return ""
