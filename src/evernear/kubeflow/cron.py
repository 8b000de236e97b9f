"""Convert cron expressions to the format of Kubeflow Pipelines (robfig/cron 1.2), which
starts with a seconds field."""

import re
from datetime import datetime

from cronsim import CronSim, CronSimError

from evernear.errors import SettingsError

UNIX_FIELDS = 5
_SHORT_FORMS = {
    "@yearly": "0 0 0 1 1 *",
    "@annually": "0 0 0 1 1 *",
    "@monthly": "0 0 0 1 * *",
    "@weekly": "0 0 0 * * 0",
    "@daily": "0 0 0 * * *",
    "@midnight": "0 0 0 * * *",
    "@hourly": "0 0 * * * *",
}
_EVERY = re.compile(r"@every (\d+[hm])+")
_FIELD = re.compile(r"[\w*?,/-]+")
_FORMS = (
    "Write five fields (minute, hour, day of the month, month, day of the week from 0 = Sunday to 6), such as"
    " '0 3 * * *' for daily at 3:00, six with the second first, or @hourly, @daily, @weekly, @monthly, @yearly or"
    " '@every 12h'."
)


def to_kfp(cron: str) -> str:
    """Convert ``cron`` to KFP's format, which starts with the seconds. For a five-field
    Unix expression, the seconds are 0.

    KFP interprets five fields as seconds to months, and would therefore run
    ``0 3 * * *`` at minute 3 of every hour.

    Raises:
        SettingsError: KFP would reject or misread the expression, or the expression
            starts several runs per minute.
    """
    fields = cron.split()
    if not fields:
        raise SettingsError(f"The schedule is empty. {_FORMS}")
    if fields[0].partition("=")[0] in ("TZ", "CRON_TZ"):
        raise SettingsError(
            f"The schedule {cron!r} names a time zone, which Kubeflow Pipelines does not read. It uses one zone for all"
            " schedules, UTC unless its administrator has set CRON_SCHEDULE_TIMEZONE; convert the hour and leave out"
            f" {fields[0]}."
        )
    normalized = " ".join(["0", *fields] if len(fields) == UNIX_FIELDS and fields[0][0] != "@" else fields)
    if normalized in _SHORT_FORMS or _EVERY.fullmatch(normalized):
        return normalized
    if fault := _fault(normalized):
        raise SettingsError(f"The schedule {cron!r} is not valid: {fault}. {_FORMS}")
    return normalized


def _fault(cron: str) -> str:
    """Explain why ``cron`` is not a valid six-field schedule, or return an empty string
    if ``cron`` is valid."""
    fields = cron.split()
    if len(fields) != UNIX_FIELDS + 1 or not all(map(_FIELD.fullmatch, fields)):
        return "it does not have five or six fields of digits, names and * ? , / -"
    try:
        CronSim(_for_cronsim(cron), datetime(2000, 1, 1))
    except CronSimError as error:
        return f"{error}".lower()
    if "L" in fields[3].upper() or re.search("7|L", fields[5].upper()):  # cronsim accepts 7 and L
        return "bad day-of-month or day-of-week"
    if not fields[0].isdecimal():
        return f"it starts several runs a minute, since its first field, {fields[0]!r}, is the seconds"
    return ""


def next_run(cron: str, now: datetime) -> datetime | None:
    """The first run time of a KFP-format schedule after ``now``, in the time zone of
    ``now``.

    The result is None for ``@every``, because only the server knows the start. The
    result is also None for an expression in an unknown format, which another client may
    have written.
    """
    try:
        return next(CronSim(_for_cronsim(cron), now))
    except (CronSimError, StopIteration):
        return None


def _for_cronsim(cron: str) -> str:
    return _SHORT_FORMS.get(cron, cron).replace("?", "*")
