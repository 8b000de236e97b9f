"""Kubeflow Pipelines: its API as the triggers and the command line need it, and the compiled pipelines.

kfp is imported only here, under ``components/`` and under ``pipelines/``, so whoever needs no server needs no kfp.
"""

from importlib import resources
from pathlib import Path

GOLDEN = Path(str(resources.files("pipelines"))) / "golden"
MODULES = ("continuous_training", "reindex", "rollback", "promote")
"""Each holds a pipeline function of its own name; the pipeline's name has hyphens for the underscores."""
NAMES = tuple(module.replace("_", "-") for module in MODULES)
PLACEHOLDER_IMAGE = "evernear-train@sha256:" + 64 * "0"
"""The image of the golden files. A cluster gets one by digest in its place: KFP's cache does not see what is behind a
tag. Run locally, no image is used."""
