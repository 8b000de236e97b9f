"""evernear keeps an image recognizer up to date, from new labeled images to a gated release that is
live."""

from evernear.common import masking, processes

processes.configure_threads()  # numerical libraries read the variables when they are loaded
masking.configure_masking()  # libraries read secrets from the environment


def __getattr__(name: str) -> str:
    """Compute ``__version__`` on demand, because reading it takes longer than the rest of this
    module."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("evernear")
