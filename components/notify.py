"""The exit step: whatever happened, tell the true state."""

from kfp import dsl

from components import component


@component
def notify(run: str, store: str, status: dsl.PipelineTaskFinalStatus, outcome: dsl.Output[dsl.Artifact]):
    """Tell whether the run promoted a release, held it, rolled one back, or failed."""
    from evernear import steps

    told = steps.notify(run, store, status.state, status.error_message or "", outcome.path)
    outcome.metadata.update(told)
