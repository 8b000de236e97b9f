"""A release -> the champion, after it has answered its stored queries."""

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
    """Publish and roll out the release; do nothing unless the verdict promotes it."""
    from evernear import steps

    steps.deploy(run, settings, started_by, release.path, verdict.path)
