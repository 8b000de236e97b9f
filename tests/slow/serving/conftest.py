"""The fixtures of `tests.real.serving.pod`."""

from tests.real.serving.pod.conftest import bucket_store, shipped, start_pod

__all__ = ["bucket_store", "shipped", "start_pod"]
