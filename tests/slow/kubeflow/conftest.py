"""The fixtures of `tests.real.kubeflow`."""

from tests.real.kubeflow.conftest import image, loopback, manifests

__all__ = ["image", "loopback", "manifests"]
