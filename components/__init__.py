"""One KFP component per step: typed artifacts in, one call to `evernear.steps`, artifacts out."""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from evernear.kubeflow import PLACEHOLDER_IMAGE


def component(function: Callable[..., Any]) -> Callable[..., dsl.PipelineTask]:
    """Make ``function`` a lightweight component; calling it in a pipeline adds a task."""
    return dsl.component(function, base_image=PLACEHOLDER_IMAGE, install_kfp_package=False)
