import threading
from datetime import timedelta
from pathlib import Path

import pytest
from watched import NOON

from evernear.errors import IntegrityError
from evernear.store import Store, open_store
from evernear.triggers.watch.switch import WATCH, LastLook, Switch


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


def look(hours: int) -> LastLook:
    return LastLook(at=NOON + timedelta(hours=hours), action="nothing", reasons=("Nothing is new.",))


def test_it_is_on_until_somebody_switches_it_off_and_says_who(store: Store) -> None:
    first = Switch(store).read()
    assert first.on
    assert Switch(store).read() == first
    off = Switch(store).turn(False, "U1")
    assert (off.on, off.by, off.id) == (False, "U1", first.id)
    assert off.since > first.since
    assert Switch(store).turn(False, "U2") == off, "it was off"
    assert Switch(store).turn(True, "U2").by == "U2"


def test_a_look_is_kept_and_no_older_one_replaces_it(store: Store) -> None:
    Switch(store).remember(look(2))
    Switch(store).turn(False, "U1")
    Switch(store).remember(look(1))
    kept = Switch(store).read()
    assert kept.last == look(2)
    assert not kept.on


def test_of_all_who_write_at_once_nothing_is_lost(bucket: str) -> None:
    def work(number: int) -> None:
        switch = Switch(open_store(f"s3://{bucket}/prod"))
        for step in range(3):
            switch.remember(look(number + 4 * step))
            switch.turn((number + step) % 2 == 0, f"U{number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = Switch(open_store(f"s3://{bucket}/prod")).read().last
    assert last == look(9)


def test_damage_is_a_sentence(store: Store) -> None:
    store.put(WATCH, b"{}")
    with pytest.raises(IntegrityError, match=r"triggers/watch\.json in .* is damaged; remove it"):
        Switch(store).read()
