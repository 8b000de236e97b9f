"""The Kubeflow Pipelines client and the compiled pipelines.

kfp is an optional dependency that only this package, ``components/`` and ``pipelines/`` import.
"""

from pathlib import Path

_PACKAGED, _CHECKOUT = Path(__file__).parent / "golden", Path(__file__).parents[3] / "pipelines" / "golden"
GOLDEN = _PACKAGED if _PACKAGED.is_dir() else _CHECKOUT
"""The compiled pipelines. ``pipelines/`` is not installed: a user's package may have its name."""
PIPELINES = ("continuous_training", "reindex", "rollback", "promote", "predict")
"""The pipeline functions, and the corresponding files in ``pipelines/golden``."""
NAMES = tuple(pipeline.replace("_", "-") for pipeline in PIPELINES)
PLACEHOLDER_IMAGE = "evernear-train@sha256:" + 64 * "0"
"""The image in the golden files, which an upload replaces. Local runs use none."""
