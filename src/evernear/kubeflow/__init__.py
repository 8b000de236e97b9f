"""The Kubeflow Pipelines client and the compiled pipelines.

kfp is an optional dependency that only this package, ``components/`` and ``pipelines/`` import.
"""

from pathlib import Path

_PACKAGED, _CHECKOUT = Path(__file__).parent / "golden", Path(__file__).parents[3] / "pipelines" / "golden"
GOLDEN = _PACKAGED if _PACKAGED.is_dir() else _CHECKOUT
"""The directory of the compiled pipelines. ``pipelines/`` is not installed, because a user's
package may have the same name."""
PIPELINES = ("continuous_training", "reindex", "rollback", "promote", "predict")
"""Names of the pipeline functions and of the corresponding files in ``pipelines/golden``."""
NAMES = tuple(pipeline.replace("_", "-") for pipeline in PIPELINES)
"""The pipeline names in Kubeflow."""
PLACEHOLDER_IMAGE = "evernear-train@sha256:" + 64 * "0"
"""The placeholder image in the golden files. An upload replaces the placeholder with a real image.
Local runs use no image."""
IMAGE_VARIABLE = "EVERNEAR_IMAGE"
"""Environment variable that contains the pipeline's image in the train task. The nodes of a
TrainJob use the same image."""
