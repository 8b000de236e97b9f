"""``evernear registry`` with a directory and with a bucket."""

import json
from pathlib import Path

import pytest
from releases import MakeRelease, PackedRelease
from typer.testing import CliRunner

from evernear.cli import app
from evernear.errors import EvernearError, IntegrityError, SettingsError, StoreError
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
    listed = json.loads(evernear("list", "--json", *here))
    assert [(each["version"], each["parent"], each["champion"]) for each in listed][1] == (two, one, True)
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
    for word in (manifest.dataset_digest, manifest.network_sha256, manifest.git_commit, "A test says so.", "accuracy"):
        assert word in shown
    assert json.loads(evernear("prune", "--keep", "1", "--json", *here)) == {"removed": [three]}
    assert evernear("prune", "--keep", "1", *here) == "Nothing to remove.\n"
    assert json.loads(evernear("show", three, "--json", *here))["pruned"] is True
    assert json.loads(evernear("show", one, "--json", *here))["pruned"] is False
    assert sorted(path.name for path in tmp_path.iterdir()) == (["store"] if uri.startswith("file") else [])


def test_unknown_release_is_reported(uri: str) -> None:
    for arguments in (("show", "20260101.000000.00000000"), ("promote", "latest")):
        with pytest.raises(StoreError, match=f"Release {arguments[1]} does not exist"):
            evernear(*arguments, "--store", uri)
    assert evernear("list", "--store", uri).splitlines()[1:] == []
    assert evernear("prune", "--keep", "3", "--store", uri) == "Nothing to remove.\n"
