"""A published release, and how its pods are started."""

from dataclasses import dataclass
from typing import Protocol

from evernear.common.disk import sha256_file
from evernear.release.archive_reader import ReleaseParts
from tests.real.serving.pod.kubelet import Pod
from tests.releases import PackedRelease

TOKEN = "0123456789abcdef0123456789abcdef"


@dataclass(frozen=True)
class Shipped:
    """A published release."""

    release: PackedRelease
    parts: ReleaseParts
    store: str

    @property
    def version(self) -> str:
        return self.release.version

    @property
    def sha256(self) -> str:
        return sha256_file(self.release.archive)

    @property
    def image(self) -> bytes:
        return self.parts.smoke_queries()[0][0]


class StartPod(Protocol):
    def __call__(self, removal_s: float = 10, **serving: object) -> Pod: ...
