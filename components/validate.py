"""A dataset -> a report of its problems. A problem of severity ``error`` stops the run."""

from typing import Any

from kfp import dsl

from components import component


@component
def validate(run: str, settings: dict[str, Any], dataset: dsl.Input[dsl.Dataset], report: dsl.Output[dsl.Markdown]):
    """Check for undecodable, conflicting, duplicate, constant and missing images."""
    from evernear import steps

    report.uri += ".md"
    steps.validate(run, settings, dataset.path, report.path)
