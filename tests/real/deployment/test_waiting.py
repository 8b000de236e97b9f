"""`evernear serve --wait`: wait until the store has a champion."""

from pathlib import Path

import pytest

from evernear.common.store import open_store
from evernear.deployment import follow as foreground
from evernear.deployment.follow import await_champion
from evernear.errors import TransientStoreError
from evernear.release.registry import Registry
from evernear.settings import Settings
from tests.releases import MakeRelease


def test_each_reason_to_wait_is_reported_once(
    make_release: MakeRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(workdir=tmp_path)
    registry, release, lines = Registry(open_store(settings.store_uri)), make_release(), list[str]()
    reachable = Registry.champion
    polls = 0

    def champion(self: Registry) -> object:
        nonlocal polls
        polls += 1
        if polls in (3, 4):
            raise TransientStoreError("The store is unreachable.")
        if polls == 5:
            registry.publish(release.archive)
        if polls == 7:
            registry.set_champion(release.version, None)
        return reachable(self)

    monkeypatch.setattr(foreground, "CHAMPION_POLL_S", 0.0)
    monkeypatch.setattr(Registry, "champion", champion)
    await_champion(settings, lines.append)
    assert polls == 7
    first, unreachable, unpromoted = lines
    assert first == f"No release has been promoted in {registry.uri} yet; run `evernear run` first. Waiting."
    assert unreachable == "The store is unreachable. Waiting."
    assert f"registry promote {release.version}" in unpromoted
