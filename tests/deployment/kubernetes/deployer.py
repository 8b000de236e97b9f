"""The deployer's manifests, and the type of the fixture that makes its settings."""

from collections.abc import Callable
from pathlib import Path

from evernear.settings import Settings

BASE = Path(__file__).parents[3] / "deploy" / "base"
IMAGE = "registry.example/evernear-serve@sha256:" + "a" * 64
MakeSettings = Callable[..., Settings]
