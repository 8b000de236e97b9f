"""The deployer's manifests, and the type of the fixture that makes its settings."""

from collections.abc import Callable

from evernear.settings import Settings
from tests import ROOT

BASE = ROOT / "deploy" / "base"
IMAGE = "registry.example/evernear-serve@sha256:" + "a" * 64
MakeSettings = Callable[..., Settings]
