"""A loss of one's own: ``train.loss = module:function``.

``function(classes, dim)`` returns a `torch.nn.Module` for one member of the network. The module is
called with unit vectors (N, dim) and class numbers (N,), and returns the mean loss. Its parameters
train with the network and are not part of a release.

If the module has a method ``logits``, which maps vectors (N, dim) to logits (N, classes), batches
are random and the logits measure the gallery, as with ArcFace. Otherwise, the loss compares the
images of a batch. A batch then has several images of each of its classes, and the nearest neighbor
measures the gallery.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evernear.common.disk import sha256_file
from evernear.common.output import printable
from evernear.errors import SettingsError
from evernear.settings.train import ARCFACE

if TYPE_CHECKING:
    from torch import nn


def build_loss(name: str, classes: int, dim: int) -> "nn.Module":
    """Call the function that ``name`` names.

    Raises:
        SettingsError: it cannot be imported or called, or returns no `torch.nn.Module`.
    """
    from torch import nn

    function = _import(name)
    try:
        loss = function(classes, dim)
    except Exception as error:
        raise SettingsError(
            f"train.loss={name} failed for {classes} classes and {dim} dimensions: {_reason(error)}"
        ) from error
    if not isinstance(loss, nn.Module):
        raise SettingsError(f"train.loss={name} returned a {type(loss).__name__}, not a torch.nn.Module.")
    return loss


def loss_sha256(name: str) -> str | None:
    """The sha256 of a loss's source file, or None for ArcFace."""
    if name == ARCFACE:
        return None
    _import(name)
    return sha256_file(Path(str(inspect.getsourcefile(import_module(name.partition(":")[0])))))


def _import(name: str) -> Callable[[int, int], Any]:
    module, _, function = name.partition(":")
    try:
        return getattr(import_module(module), function)
    except Exception as error:
        raise SettingsError(
            f"train.loss={name} cannot be imported: {_reason(error)} Put the module on PYTHONPATH and, for a cluster, "
            "in the image."
        ) from error


def _reason(error: Exception) -> str:
    text = " ".join(printable(str(error)).split()).rstrip(".")
    return f"{type(error).__name__}: {text}." if text else f"{type(error).__name__}."
