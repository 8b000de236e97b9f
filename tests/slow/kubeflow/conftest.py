"""The fixtures of `tests.real.kubeflow`."""

from tests.real.kubeflow.conftest import component, pipeline_cluster, step_image

__all__ = ["component", "pipeline_cluster", "step_image"]
