"""``evernear registry`` as a user types it."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evernear.cli.app import app
from evernear.common.store import open_store
from evernear.errors import EvernearError, IntegrityError, SettingsError, StoreError
from evernear.release.pruning import prune_releases
from evernear.release.registry import Registry
from tests import command_line
from tests.releases import MakeRelease, PackedRelease


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return (tmp_path / "store").as_uri()


@pytest.fixture(scope="module")
def held(make_release: MakeRelease, releases: tuple[PackedRelease, ...]) -> PackedRelease:
    """A held release, which follows the others."""
    return make_release(parent=releases[-1].version, promote=False)


def evernear(*arguments: str) -> str:
    """The output of a command. Raises its error."""
    completed = CliRunner().invoke(app, ["registry", *arguments], catch_exceptions=True)
    if isinstance(completed.exception, EvernearError):
        raise completed.exception
    assert completed.exit_code == 0, completed.output
    return completed.output


def test_promote_roll_back_list_and_prune(
    uri: str, releases: tuple[PackedRelease, ...], held: PackedRelease, tmp_path: Path
) -> None:
    options = ("--store", uri)
    first, second, third = (release.version for release in releases)
    registry = Registry(open_store(uri))
    for release in (*releases, held):
        registry.publish(release.archive)
    assert {each["champion"] for each in json.loads(evernear("list", "--json", *options))} == {False}

    for version in (first, second):
        deployed = json.loads(evernear("promote", version, "--why", "first light", "--json", *options))
        assert (deployed["version"], deployed["url"]) == (version, None)
    champion = json.loads(evernear("list", "--history", "--json", *options))[-1]
    assert (champion["version"], champion["previous"]) == (second, first)

    with pytest.raises(IntegrityError, match="--force"):
        evernear("promote", held.version, *options)
    with pytest.raises(SettingsError, match="--why"):
        evernear("promote", held.version, "--force", *options)
    evernear("promote", held.version, "--force", "--why", "the floor was wrong", *options)
    assert f"Release {second} is the champion" in evernear("rollback", *options)

    rows = evernear("list", *options).splitlines()
    assert [row.split()[0] for row in rows[1:]] == [first, second, third, held.version]
    assert [row.split()[0] for row in rows if "champion" in row] == [second]
    assert "of 20 test images: 17 named right, 0 named wrong, 3 called unknown" in rows[1]
    assert rows[0].split("  ")[-1].strip() == "size"
    columns = [re.split(r"\s{2,}", row) for row in rows[1:]]
    assert [state.split()[0] for _, _, _, state, *_ in columns] == ["promoted", "champion", "not", "promoted"]
    listed = json.loads(evernear("list", "--json", *options))
    assert [(each["version"], each["parent"], each["champion"]) for each in listed][1] == (second, first, True)
    assert [release["state"] for release in listed] == ["promoted", "champion", "not promoted", "promoted"]
    assert listed[3]["verdict"] == {"promote": False, "reasons": ["A test says so."]}

    promotions = json.loads(evernear("list", "--history", "--json", *options))
    assert [(p["version"], p["how"]) for p in promotions] == [
        (first, "promote"),
        (second, "promote"),
        (held.version, "force"),
        (second, "rollback"),
    ]
    assert "the floor was wrong" in evernear("list", "--history", *options)

    manifest = releases[0].manifest
    output = evernear("show", first, *options)
    assert re.search(r"\nsource +digits\n", output)
    assert re.search(r"\ntraining settings\n(  .+\n)*  epochs +4\n", output)
    for word in (
        manifest.dataset_digest,
        manifest.network_sha256,
        manifest.git_commit,
        "A test says so.",
        "label_right",
    ):
        assert word in output
    assert prune_releases(registry, 1) == (third,)
    assert json.loads(evernear("show", third, "--json", *options))["pruned"] is True
    assert json.loads(evernear("show", first, "--json", *options))["pruned"] is False
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


def test_list_marks_held_releases_until_a_person_promotes_them(uri: str, held: PackedRelease) -> None:
    options = ("--store", uri)
    Registry(open_store(uri)).publish(held.archive)
    assert json.loads(evernear("list", "--json", *options))[0]["state"] == "held"
    evernear("promote", held.version, "--force", "--why", "the floor was wrong", *options)
    assert json.loads(evernear("list", "--json", *options))[0]["state"] == "champion"


def test_unknown_release_is_reported(uri: str) -> None:
    for arguments in (("show", "20260101.000000.00000000"), ("promote", "latest")):
        with pytest.raises(StoreError, match=f"Release {arguments[1]} does not exist"):
            evernear(*arguments, "--store", uri)
    assert evernear("list", "--store", uri).splitlines()[0] == f"No release is in {uri} yet."
    assert (
        evernear("list", "--history", "--store", uri).splitlines()[0] == f"No release has been promoted in {uri} yet."
    )
    assert command_line.evernear("runs", environment={"EVERNEAR_STORE": uri}).stderr == f"No run is in {uri} yet.\n"


def test_anchor_is_printed_and_moved_with_a_reason(uri: str, releases: tuple[PackedRelease, ...]) -> None:
    options = ("--store", uri)
    first, second = (release.version for release in releases[:2])
    registry = Registry(open_store(uri))
    with pytest.raises(StoreError, match="No release has been promoted"):
        evernear("anchor", *options)
    for release in releases[:2]:
        registry.publish(release.archive)
        evernear("promote", release.version, *options)
    assert evernear("anchor", *options) == f"{first}\n"
    with pytest.raises(SettingsError, match=r"needs a reason; add --why"):
        evernear("anchor", second, *options)
    with pytest.raises(StoreError, match="does not exist"):
        evernear("anchor", "20260101.000000.00000000", "--why", "typo", *options)
    moved = evernear("anchor", second, "--why", "the classes are harder now", *options)
    assert moved == f"Release {second} is the anchor now.\n"
    assert json.loads(evernear("anchor", "--json", *options)) == {"anchor": second, "champion": second}
    with pytest.raises(StoreError, match=f"{second} is the anchor already"):
        evernear("anchor", second, "--why", "again", *options)
    last = json.loads(evernear("list", "--history", "--json", *options))[-1]
    assert (last["how"], last["anchor"], last["why"]) == ("anchor", second, "the classes are harder now")
    assert registry.pointer.made_live(registry.require_champion()).how == "promote"


def test_a_pruned_release_is_not_promised_as_target_of_a_rollback(
    uri: str, releases: tuple[PackedRelease, ...]
) -> None:
    registry, champion = Registry(open_store(uri)), None
    first, second, third = (release.version for release in releases[:3])
    for release in releases[:3]:
        registry.publish(release.archive)
        champion = registry.set_champion(release.version, champion)
    assert champion is not None
    registry.set_anchor(third, champion)
    assert prune_releases(registry, keep=1) == (first,)
    assert f"No rollback is possible: {first}, the champion before it, was pruned." in evernear(
        "rollback", "--store", uri
    )
    assert f"A rollback would restore {second}." in evernear("promote", third, "--store", uri)


def test_list_names_damage_and_restore_mends_the_pointer(uri: str, releases: tuple[PackedRelease, ...]) -> None:
    store = open_store(uri)
    registry, champion = Registry(store), None
    first, second = (release.version for release in releases[:2])
    for release in releases[:2]:
        registry.publish(release.archive)
        champion = registry.set_champion(release.version, champion)
    store.put("releases/champion.json", b"")
    store.put(f"releases/manifests/{first}.json", b"")
    output = evernear("list", "--store", uri)
    assert re.search(rf"{first} +- +- +damaged", output)
    assert second in output
    assert "it is empty; run `evernear registry restore`" in output
    assert f"Release {second} is the champion again, as promotion 3" in evernear("restore", "--store", uri)
    assert registry.require_champion().version == second
