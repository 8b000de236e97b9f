"""The exit step: the run -> its outcome and the run page."""

from kfp import dsl

from components import component


@component
def notify(run: str, store: str, pipeline: str, status: dsl.PipelineTaskFinalStatus, outcome: dsl.Output[dsl.Artifact],
           page: dsl.Output[dsl.HTML]):  # fmt: skip
    """Record whether the run promoted, held, rolled back, was stopped or failed, and write the run page."""
    from evernear import steps

    page.uri += ".html"
    error = status.error_message or ""
    outcome.metadata.update(steps.notify(run, store, pipeline, status.state, error, outcome.path, page.path))
