"""A dataset -> a report of its faults; stops the run at a fault of severity ``error``."""

from kfp import dsl

from components import component


@component
def validate(store: str, settings: dict, dataset: dsl.Input[dsl.Dataset], report: dsl.Output[dsl.Markdown]):
    """Look for undecodable, conflicting, duplicate, constant and missing images."""
    from evernear import steps

    steps.validate(store, settings, dataset.path, report.path)
