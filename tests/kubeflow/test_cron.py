"""Schedules as Kubeflow Pipelines reads them, checked before the server is asked."""

from datetime import UTC, datetime

import pytest

from evernear.errors import SettingsError
from evernear.kubeflow.cron import next_run, to_kfp
from tests.loopback.kfp.state import CRON


@pytest.mark.parametrize(
    ("cron", "with_seconds"),
    [
        ("0 3 * * *", "0 0 3 * * *"),
        (" 30  2 * * MON-FRI", "0 30 2 * * MON-FRI"),
        ("15 0 3 * * *", "15 0 3 * * *"),
        ("0 3 ? * 0,6", "0 0 3 ? * 0,6"),
        ("5/20 * * jan-mar *", "0 5/20 * * jan-mar *"),
        ("@hourly", "@hourly"),
        ("@every 1h30m", "@every 1h30m"),
    ],
)
def test_accepted_forms(cron: str, with_seconds: str) -> None:
    assert to_kfp(cron) == with_seconds
    assert CRON.fullmatch(with_seconds)  # the fake server, as robfig/cron 1.2


@pytest.mark.parametrize(
    ("cron", "reason"),
    [
        ("0 3 * *", "it does not have five or six fields"),
        ("0 0 3 * * * *", "it does not have five or six fields"),
        ("nightly", "it does not have five or six fields"),
        ("@nightly", "it does not have five or six fields"),
        ("@every 1s", "it does not have five or six fields"),
        ("@every day", "it does not have five or six fields"),
        ("", "The schedule is empty"),
        ("61 3 * * *", "bad minute"),
        ("0 3 31 2 *", "bad day-of-month"),
        ("0 3 * * 7", "or day-of-week"),
        ("0 3 * * SUN#2", "it does not have five or six fields"),
        ("0 3 * * 5L", "or day-of-week"),
        ("0 3 L * *", "bad day-of-month"),
        ("* * * * * *", "its first field, '\\*', is the seconds"),
        ("*/10 * * * * *", "its first field, '\\*/10', is the seconds"),
        ("TZ=Europe/Berlin 0 3 * * *", "CRON_SCHEDULE_TIMEZONE; .* leave out TZ=Europe/Berlin"),
        ("CRON_TZ=UTC 0 3 * * *", "leave out CRON_TZ=UTC"),
    ],
)
def test_rejected_forms_name_the_accepted_ones(cron: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason) as error:
        to_kfp(cron)
    assert "TZ" in cron or "'0 3 * * *' for daily at 3:00" in str(error.value)


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("0 0 3 * * *", "2026-11-26T03:00:00+00:00"),
        ("@weekly", "2026-11-29T00:00:00+00:00"),
        ("0 0 3 ? * MON", "2026-11-30T03:00:00+00:00"),
        ("@every 1h", None),
        ("what another client wrote", None),
    ],
)
def test_next_run(cron: str, expected: str | None) -> None:
    following = next_run(cron, datetime(2026, 11, 25, 18, 30, tzinfo=UTC))
    assert (following and following.isoformat()) == expected
