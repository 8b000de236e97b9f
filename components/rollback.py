"""The release before the champion -> what serves again."""

from components import component


@component
def rollback(
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
    """Take the champion's last move back, once the release before it has proved that it answers."""
    from evernear import steps

    steps.rollback(run, store, target, workdir, settings, kubernetes, release, why, by)
