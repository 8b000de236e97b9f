"""Helpers for commands with an output of many parts."""

import sys
from collections.abc import Callable
from pathlib import Path

from evernear.common.output import print_line, quantity
from evernear.errors import SettingsError

INTERRUPTED = "Interrupted. Finished parts stay; run the command again to continue."


def output_uri(out: str) -> str:
    """The store URI for ``--out``, which is a directory or ``s3://bucket/prefix``."""
    if not out:
        raise SettingsError("--out is empty; name a directory or s3://bucket/prefix.")
    return out if out.startswith(("s3://", "file://")) else Path(out).expanduser().resolve().as_uri()


def parts_progress() -> Callable[[int, int], None]:
    """Print the number of finished parts and the remaining time to stderr."""
    from evernear.common.progress import Countdown

    countdown = Countdown(lambda text: print_line(text, sys.stderr))

    def report(done: int, total: int) -> None:
        countdown(done, total, f"{done:,} of {quantity(total, 'part')} done")

    return report
