"""The Kubeflow Pipelines client and the compiled pipelines.

kfp is an optional dependency: only this package, ``components/`` and ``pipelines/`` import it.
"""

from pathlib import Path

_PACKAGED, _CHECKOUT = Path(__file__).parent / "golden", Path(__file__).parents[3] / "pipelines" / "golden"
GOLDEN = _PACKAGED if _PACKAGED.is_dir() else _CHECKOUT
"""The compiled pipelines. ``pipelines/`` itself is not installed, because a user may have a package of that name."""
PIPELINES = ("continuous_training", "reindex", "rollback", "promote")
"""Names of the pipeline functions and of their files in ``pipelines/golden``."""
NAMES = tuple(pipeline.replace("_", "-") for pipeline in PIPELINES)
"""The names of the pipelines in Kubeflow."""
PLACEHOLDER_IMAGE = "evernear-train@sha256:" + 64 * "0"
"""The image in the golden files. An upload replaces it with a real one; local runs use no image."""
IMAGE_VARIABLE = "EVERNEAR_IMAGE"
"""Environment variable of the train task: the image of the pipeline, which the nodes of a TrainJob use as well."""
