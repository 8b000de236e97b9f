"""Helpers for TorchScript, the format in which a network is exported, served and run in batches."""

import io
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from evernear.errors import IntegrityError


def to_torchscript(network: nn.Module) -> bytes:
    """Put the network in eval mode, and serialize it as TorchScript."""
    buffer = io.BytesIO()
    with ignore_torchscript_deprecation():
        torch.jit.save(torch.jit.script(network.eval()), buffer)
    return buffer.getvalue()


def load_torchscript(file: Path) -> torch.jit.ScriptModule:
    """Load a TorchScript file on the CPU, with the parameters frozen as constants.

    The caller must have verified the file.

    Raises:
        IntegrityError: the file is not TorchScript.
    """
    return freeze_parameters(read_torchscript(file))


def read_torchscript(file: Path) -> torch.jit.ScriptModule:
    """Load a TorchScript file on the CPU, and keep the submodules. See `load_torchscript`."""
    with ignore_torchscript_deprecation():
        try:
            return torch.jit.load(file, map_location="cpu").eval()
        except (RuntimeError, ValueError) as error:
            raise IntegrityError(f"{file} is not a TorchScript network; run the export step again.") from error


def freeze_parameters(network: nn.Module) -> torch.jit.ScriptModule:
    """Put the network in eval mode, script it, and turn its parameters into constants."""
    with ignore_torchscript_deprecation():
        scripted = network if isinstance(network, torch.jit.ScriptModule) else torch.jit.script(network.eval())
        return torch.jit.freeze(scripted.eval())


@contextmanager
def ignore_torchscript_deprecation() -> Generator[None]:
    """Ignore the deprecation warnings of ``torch.jit`` (torch 2.13).

    evernear cannot replace TorchScript, because TorchServe loads TorchScript.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        yield
