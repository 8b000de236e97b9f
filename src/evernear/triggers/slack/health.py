"""The bot's heartbeat: a file that is written again and again while the bot is well."""

import time
from datetime import UTC, datetime
from pathlib import Path

from evernear.disk import write_atomically
from evernear.settings import Settings

BEAT_S = 10.0
WELL_FOR_S = 60.0
"""An older heartbeat means that the process is gone, or hangs."""


def beat(settings: Settings) -> None:
    """Say that the bot is well.

    Raises:
        StoreError: the working directory cannot be written.
    """
    write_atomically(_file(settings), datetime.now(UTC).isoformat())


def is_well(settings: Settings) -> bool:
    """Whether the bot of this working directory has said so lately."""
    try:
        age_s = time.time() - _file(settings).stat().st_mtime
    except OSError:
        return False
    return age_s < WELL_FOR_S


def _file(settings: Settings) -> Path:
    return settings.workdir / "slack.health"
