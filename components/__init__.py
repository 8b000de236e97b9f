"""One KFP component per step: typed artifacts in, one call into evernear, artifacts out."""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from evernear.kubeflow import PLACEHOLDER_IMAGE


def component(function: Callable[..., Any]) -> Callable[..., dsl.PipelineTask]:
    """``function`` as a lightweight component; a pipeline calls it with the inputs of one task."""
    return dsl.component(function, base_image=PLACEHOLDER_IMAGE, install_kfp_package=False)
