"""The key under which a network's outputs are cached."""

import hashlib

import torch
from torch import nn

from evernear.common.step_results import code_digest
from evernear.embedding import CODE

LIBRARIES = ("timm", "torch")
"""Libraries whose versions affect a network's outputs."""


def network_identity(network: nn.Module, architecture: str) -> str:
    """The sha256 of ``architecture``, the parameters and buffers of ``network``, and the code."""
    sha256 = hashlib.sha256(architecture.encode())
    sha256.update(code_digest(CODE, LIBRARIES).encode())
    for name, tensor in sorted(network.state_dict().items()):
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha256.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()
