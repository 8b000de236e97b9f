"""The Kubeflow Pipelines client and the compiled pipelines.

kfp is an optional dependency. Only this package,
``components/`` and ``pipelines/`` import it.
"""

from pathlib import Path

_PACKAGED, _CHECKOUT = Path(__file__).parent / "golden", Path(__file__).parents[3] / "pipelines" / "golden"
GOLDEN = _PACKAGED if _PACKAGED.is_dir() else _CHECKOUT
"""The directory of the compiled pipelines. ``pipelines/`` is not installed, because a
user may have a package with this name."""
PIPELINES = ("continuous_training", "reindex", "rollback", "promote", "predict")
"""Names of the pipeline functions, and of their files in ``pipelines/golden``."""
NAMES = tuple(pipeline.replace("_", "-") for pipeline in PIPELINES)
"""The pipeline names in Kubeflow."""
PLACEHOLDER_IMAGE = "evernear-train@sha256:" + 64 * "0"
"""The image in the golden files. An upload replaces it with a real image.
Local runs use no image."""
IMAGE_VARIABLE = "EVERNEAR_IMAGE"
"""Environment variable of the train task with the pipeline's image,
which the nodes of a TrainJob also use."""
