"""The champion -> its network and threshold, for a new index."""

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
    """Extract the network and the open-set threshold from the champion's release."""
    from evernear import steps

    network.metadata.update(steps.reuse(run, settings, dataset.path, network.path, open_set.path))
