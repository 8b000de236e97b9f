"""All calls of ``torch.jit``, which torch 2.13 calls deprecated and which TorchServe's models are made of."""

import io
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from evernear.embedding.network import EmbeddingNetwork
from evernear.errors import IntegrityError


def script(network: EmbeddingNetwork) -> bytes:
    """The network, in eval mode, as a TorchScript file."""
    buffer = io.BytesIO()
    with _deprecated():
        torch.jit.save(torch.jit.script(network.eval()), buffer)
    return buffer.getvalue()


def load(path: Path, optimize: bool) -> torch.jit.ScriptModule:
    """A TorchScript file on the CPU; ``optimize`` folds and reorders its weights for this very machine.

    That is done here and not before saving, because an optimised graph holds operators of this machine's
    oneDNN and does not load back.

    Raises:
        IntegrityError: the file is no TorchScript.
    """
    with _deprecated():
        try:
            network = torch.jit.load(path, map_location="cpu").eval()
        except (RuntimeError, ValueError) as error:
            raise IntegrityError(f"{path} is no TorchScript network; export it again.") from error
        return torch.jit.optimize_for_inference(torch.jit.freeze(network)) if optimize else network


@contextmanager
def _deprecated() -> Generator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        yield
