"""Network, index, preprocessing and verdict -> a release in one .mar file."""

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
    """Pack the release with torch-model-archiver."""
    from evernear import steps

    parts = {"network": network.path, "index": index.path, "evaluation": evaluation.path, "verdict": verdict.path}
    release.metadata["version"] = steps.archive(run, settings, dataset.path, parts, release.path)
