"""The champion's network and threshold, for another gallery."""

from typing import Any

from kfp import dsl

from components import component


@component
def reuse(
    run: str,
    settings: dict[str, Any],
    dataset: dsl.Input[dsl.Dataset],
    network: dsl.Output[dsl.Model],
    open_set: dsl.Output[dsl.Artifact],
):
    """Take the champion's network out of its release, with the threshold that was found with it."""
    from evernear import steps

    network.metadata.update(steps.reuse(run, settings, dataset.path, network.path, open_set.path))
