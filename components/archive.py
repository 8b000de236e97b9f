"""Network, index, preprocessing and verdict -> one release, one .mar."""

from typing import Any

from kfp import dsl

from components import component


@component
def archive(
    run: str,
    settings: dict[str, Any],
    dataset: dsl.Input[dsl.Dataset],
    network: dsl.Input[dsl.Model],
    index: dsl.Input[dsl.Model],
    evaluation: dsl.Input[dsl.Artifact],
    verdict: dsl.Input[dsl.Artifact],
    release: dsl.Output[dsl.Model],
):
    """Pack the .mar with torch-model-archiver."""
    from evernear import steps

    parts = (dataset.path, network.path, index.path, evaluation.path, verdict.path)
    release.metadata["version"] = steps.archive(run, settings, *parts, release.path)
