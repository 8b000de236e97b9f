"""TorchScript, in which a network is exported, served and run in batches."""

import io
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from evernear.errors import IntegrityError


def to_torchscript(network: nn.Module) -> bytes:
    buffer = io.BytesIO()
    with ignore_torchscript_deprecation():
        torch.jit.save(torch.jit.script(network.eval()), buffer)
    return buffer.getvalue()


def load_torchscript(file: Path) -> torch.jit.ScriptModule:
    """Load a file on the CPU, with constant parameters. The caller must have verified the file."""
    return freeze_parameters(read_torchscript(file))


def read_torchscript(file: Path) -> torch.jit.ScriptModule:
    """Like `load_torchscript`, but keeps the submodules."""
    with ignore_torchscript_deprecation():
        try:
            return torch.jit.load(file, map_location="cpu").eval()
        except (RuntimeError, ValueError) as error:
            raise IntegrityError(f"{file} is not a TorchScript network; run the export step again.") from error


def freeze_parameters(network: nn.Module) -> torch.jit.ScriptModule:
    """Script the network in eval mode, and turn its parameters into constants."""
    with ignore_torchscript_deprecation():
        scripted = network if isinstance(network, torch.jit.ScriptModule) else torch.jit.script(network.eval())
        return torch.jit.freeze(scripted.eval())


@contextmanager
def ignore_torchscript_deprecation() -> Generator[None]:
    """``torch.jit`` is deprecated (torch 2.13), but TorchServe loads only TorchScript."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        yield
