"""A release that was kept -> what serves, because a person says so."""

from components import component


@component
def promote(
    run: str,
    store: str,
    target: str,
    workdir: str,
    settings: dict,
    kubernetes: dict,
    release: str,
    why: str,
    by: str,
):
    """Let a release of the registry serve, also against its verdict, once it has proved that it answers."""
    from evernear import steps

    steps.promote(run, store, target, workdir, settings, kubernetes, release, why, by)
