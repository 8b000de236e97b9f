"""The bot's heartbeat file.

This module does not import Slack's libraries, because a probe loads the module every few seconds.
"""

import time
from datetime import UTC, datetime
from pathlib import Path

from evernear.common.disk import write_atomically
from evernear.settings import Settings

INTERVAL_S = 10.0
MAX_AGE_S = 60.0


def write(settings: Settings) -> None:
    """Record that the bot is healthy."""
    write_atomically(_file(settings), datetime.now(UTC).isoformat())


def is_recent(settings: Settings) -> bool:
    """Whether the bot of this working directory was healthy within the last `MAX_AGE_S` seconds."""
    try:
        age_s = time.time() - _file(settings).stat().st_mtime
    except OSError:
        return False
    return age_s < MAX_AGE_S


def _file(settings: Settings) -> Path:
    return settings.workdir / "slack.health"
