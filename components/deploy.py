"""A release -> what serves, once it has proved that it answers."""

from typing import Any

from kfp import dsl

from components import component


@component
def deploy(
    run: str,
    settings: dict[str, Any],
    started_by: str,
    release: dsl.Input[dsl.Model],
    verdict: dsl.Input[dsl.Artifact],
):
    """Publish the release and roll it out; fails closed when the verdict does not promote it."""
    from evernear import steps

    steps.deploy(run, settings, started_by, release.path, verdict.path)
