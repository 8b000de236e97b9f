"""``evernear registry`` with a directory and with a bucket."""

import json
import re
from pathlib import Path

import pytest
from releases import MakeRelease, PackedRelease
from typer.testing import CliRunner

from evernear.cli import app
from evernear.errors import EvernearError, IntegrityError, SettingsError, StoreError
from evernear.release.manifest import ReleaseManifest
from evernear.release.registry import Registry
from evernear.store import open_store


@pytest.fixture(params=["file", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    if request.param == "file":
        return (tmp_path / "store").as_uri()
    return f"s3://{request.getfixturevalue('bucket')}/team"


@pytest.fixture(scope="module")
def releases(make_release: MakeRelease) -> list[PackedRelease]:
    """Three promoted releases, each the parent of the next, and a held one."""
    packed = [make_release()]
    for promote in (True, True, False):
        packed.append(make_release(parent=packed[-1].version, promote=promote))
    return packed


def evernear(*arguments: str) -> str:
    """The output of a command. Raises its error."""
    done = CliRunner().invoke(app, ["registry", *arguments], catch_exceptions=True)
    if isinstance(done.exception, EvernearError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_promote_roll_back_list_and_prune(uri: str, releases: list[PackedRelease], tmp_path: Path) -> None:
    here = ("--store", uri)
    one, two, three, held = (release.version for release in releases)
    registry = Registry(open_store(uri))
    for release in releases:
        registry.publish(release.archive)
    with pytest.raises(StoreError, match="No release has been promoted"):
        evernear("champion", *here)

    for version in (one, two):
        deployed = json.loads(evernear("promote", version, "--why", "first light", "--json", *here))
        assert (deployed["version"], deployed["url"]) == (version, None)
    assert evernear("champion", *here) == f"{two}\n"
    assert json.loads(evernear("champion", "--json", *here))["previous"] == one

    with pytest.raises(IntegrityError, match="--force"):
        evernear("promote", held, *here)
    with pytest.raises(SettingsError, match="--why"):
        evernear("promote", held, "--force", *here)
    evernear("promote", held, "--force", "--why", "the floor was wrong", *here)
    assert f"Release {two} is the champion" in evernear("rollback", *here)

    rows = evernear("list", *here).splitlines()
    assert [row.split()[0] for row in rows[1:]] == [one, two, three, held]
    assert [row.split()[0] for row in rows if "champion" in row] == [two]
    assert "90.00%" in rows[1]
    assert rows[0].split("  ")[-1].strip() == "size"
    assert [row.split()[4] for row in rows[1:]] == ["promoted", "champion", "not", "promoted"]
    listed = json.loads(evernear("list", "--json", *here))
    assert [(each["version"], each["parent"], each["champion"]) for each in listed][1] == (two, one, True)
    assert [release["state"] for release in listed] == ["promoted", "champion", "not promoted", "promoted"]
    assert listed[3]["verdict"] == {"promote": False, "reasons": ["A test says so."]}

    promotions = json.loads(evernear("history", "--json", *here))
    assert [(p["version"], p["how"]) for p in promotions] == [
        (one, "promote"),
        (two, "promote"),
        (held, "force"),
        (two, "rollback"),
    ]
    assert "the floor was wrong" in evernear("history", *here)

    manifest = releases[0].manifest
    shown = evernear("show", one, *here)
    assert re.search(r"\nsource +digits\n", shown)
    assert re.search(r"\ntraining settings\n  epochs +4\n", shown)
    for word in (manifest.dataset_digest, manifest.network_sha256, manifest.git_commit, "A test says so.", "accuracy"):
        assert word in shown
    assert json.loads(evernear("prune", "--keep", "1", "--json", *here)) == {"removed": [three]}
    assert evernear("prune", "--keep", "1", *here) == "Nothing to remove.\n"
    assert json.loads(evernear("show", three, "--json", *here))["pruned"] is True
    assert json.loads(evernear("show", one, "--json", *here))["pruned"] is False
    assert sorted(path.name for path in tmp_path.iterdir()) == (["store"] if uri.startswith("file") else [])


def test_list_marks_held_releases_until_a_person_promotes_them(releases: list[PackedRelease], tmp_path: Path) -> None:
    here = ("--store", (tmp_path / "store").as_uri())
    held = releases[-1]
    Registry(open_store(here[1])).publish(held.archive)
    assert json.loads(evernear("list", "--json", *here))[0]["state"] == "held"
    evernear("promote", held.version, "--force", "--why", "the floor was wrong", *here)
    assert json.loads(evernear("list", "--json", *here))[0]["state"] == "champion"


def test_release_of_an_earlier_version_has_no_training_settings(
    releases: list[PackedRelease], tmp_path: Path, make_release: MakeRelease
) -> None:
    old = releases[0].manifest.model_copy(update={"source": None, "training": None})
    assert ReleaseManifest.from_json(old.model_dump_json(exclude={"source", "training"}), "old") == old
    store = open_store((tmp_path / "store").as_uri())
    published = Registry(store).publish(releases[0].archive)
    record = published.model_copy(update={"manifest": old})
    store.put(f"releases/manifests/{old.version}.json", record.to_json())
    assert re.search(r"\ntraining settings +-\n", evernear("show", old.version, "--store", store.uri))


def test_unknown_release_is_reported(uri: str) -> None:
    for arguments in (("show", "20260101.000000.00000000"), ("promote", "latest")):
        with pytest.raises(StoreError, match=f"Release {arguments[1]} does not exist"):
            evernear(*arguments, "--store", uri)
    assert evernear("list", "--store", uri).splitlines()[1:] == []
    assert evernear("prune", "--keep", "3", "--store", uri) == "Nothing to remove.\n"
