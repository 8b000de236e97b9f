import threading
from datetime import timedelta

import pytest

from evernear.common.store import Store, open_store
from evernear.errors import IntegrityError
from evernear.triggers.watch.schedule_state import STATE, CheckReport, ScheduleStore
from tests.real.triggers.watch.watched import NOON


def report(hours: int) -> CheckReport:
    return CheckReport(at=NOON + timedelta(hours=hours), action="nothing", reasons=("Nothing is new.",))


def test_watcher_is_on_until_a_person_pauses_it(store: Store) -> None:
    first = ScheduleStore(store).read()
    assert first.on
    assert ScheduleStore(store).read() == first
    off = ScheduleStore(store).switch(False, "U1")
    assert (off.on, off.by, off.id) == (False, "U1", first.id)
    assert off.since > first.since
    assert ScheduleStore(store).switch(False, "U2") == off, "it was off before"
    assert ScheduleStore(store).switch(True, "U2").by == "U2"


def test_concurrent_writers_lose_nothing(bucket: str) -> None:
    def work(number: int) -> None:
        state = ScheduleStore(open_store(f"s3://{bucket}/prod"))
        for step in range(3):
            state.save(report(number + 4 * step))
            state.switch((number + step) % 2 == 0, f"U{number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = ScheduleStore(open_store(f"s3://{bucket}/prod")).read().last
    assert last in (report(8), report(9))


def test_damaged_state_is_reported(store: Store) -> None:
    store.put(STATE, b"{}")
    with pytest.raises(
        IntegrityError, match=r"triggers/watch\.json is not a valid schedule state: .*; remove it to start over"
    ):
        ScheduleStore(store).read()
