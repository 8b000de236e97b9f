"""``evernear store check``, and ``evernear status`` without a working directory."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evernear.cli.app import app
from evernear.data.ingest import ingest_source
from evernear.errors import IntegrityError, SettingsError
from evernear.settings import DataSettings


@pytest.fixture
def lost(tmp_path: Path) -> Path:
    """A lost shard of a store."""
    manifest = ingest_source(DataSettings(source="digits"), (tmp_path / "store").as_uri())
    path = tmp_path / "store/datasets/digits/shards" / f"{manifest.shards[0].sha256}.npy"
    path.unlink()
    return path


def test_check_names_damage_and_repair_mends_it(lost: Path, tmp_path: Path) -> None:
    command = ["store", "check", "--workdir", str(tmp_path)]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == IntegrityError.exit_code
    assert re.search(rf"^DAMAGED +datasets/digits/shards/{lost.name}$", found.output, re.MULTILINE)
    assert "Needed by the newest snapshot of digits." in found.output
    assert "Repair it with `evernear store check --repair`." in found.output
    assert json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)[0]["needed_by"]
    repaired = CliRunner().invoke(app, [*command, "--repair"])
    assert repaired.exit_code == 0
    assert "1 object missing or damaged, 1 repaired." in repaired.output
    assert re.search(rf"^repaired +datasets/digits/shards/{lost.name}$", repaired.output, re.MULTILINE)
    intact = CliRunner().invoke(app, command)
    assert (intact.exit_code, intact.output) == (0, "Intact.\n")


def test_repair_is_offered_only_for_damage_that_it_mends(tmp_path: Path) -> None:
    (tmp_path / "store/releases").mkdir(parents=True)
    (tmp_path / "store/releases/champion.json").write_text("no JSON")
    found = CliRunner().invoke(app, ["store", "check", "--workdir", str(tmp_path)])
    assert found.exit_code == IntegrityError.exit_code
    assert "until `evernear registry restore` writes it again" in found.output
    assert "Repair it" not in found.output


def test_status_of_a_directory_that_does_not_exist_fails(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["status", "--workdir", str(tmp_path / "nowhere")])
    assert isinstance(done.exception, SettingsError)
    assert "nowhere does not exist" in str(done.exception)
    assert not (tmp_path / "nowhere").exists()
