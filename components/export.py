"""A trained network -> TorchScript that matches the eager network."""

from typing import Any

from kfp import dsl

from components import component


@component
def export(
    run: str,
    settings: dict[str, Any],
    dataset: dsl.Input[dsl.Dataset],
    trained: dsl.Input[dsl.Model],
    network: dsl.Output[dsl.Model],
):
    """Export TorchScript and compare it with the eager network on real images."""
    from evernear import steps

    network.metadata.update(steps.export(run, settings, dataset.path, trained.path, network.path))
