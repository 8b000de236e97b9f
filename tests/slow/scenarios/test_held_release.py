"""A first release that the gate holds:
every command that evernear prints in that state works."""

import re
import shlex
from pathlib import Path

import pytest

from evernear.settings.layers import FILE
from tests.real.scenarios.workspace import Workspace, write_digits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def six_digits(tmp_path: Path) -> Workspace:
    write_digits(tmp_path / "images", labels="012345", per_class=40)
    return Workspace(tmp_path, EVERNEAR_GATE__ACCURACY_FLOOR="0")


def test_every_command_printed_after_a_held_first_release_works(six_digits: Workspace) -> None:
    image = next((six_digits.directory / "images" / "3").iterdir())
    options = "--preset quick --set target=registry --set gate.accuracy_floor=1.0 --set train.epochs=1"
    done = six_digits.command("run", *options.split())
    assert done.returncode == 0, done.stderr
    remembered = (six_digits.workdir / FILE).read_text()
    assert "accuracy_floor = 1.0" in remembered
    reason = re.search(r"  - (Label right: .* below the floor of 100.00%\.)", done.stdout)
    assert reason is not None, done.stdout
    assert (done.stdout + done.stderr).count(reason[1]) == 1, "a reason is printed once"
    steps = dict(re.findall(r"^  - ([^:]+): (.*)$", done.stdout.partition("\nNext:\n")[2], re.M))
    assert set(steps) == {
        "run again with a gate that lets it pass",
        "recognize images without promoting it",
        "promote it anyway",
    }
    page = Path(done.stdout.splitlines()[-1].removeprefix("run page: "))
    assert page.read_text().startswith("<!doctype html>")

    for command in (["predict", str(image)], ["serve"], ["reindex", "--preset", "quick"]):
        code, message = six_digits.refused(*command)
        assert code != 0
        show, promote = (shlex.split(text)[1:] for text in re.findall("`(evernear [^`]*)`", message))
        assert "below the floor of 100.00%" in six_digits.command(*show).stdout
        assert promote[:2] == ["registry", "promote"]
    assert not [command for command in steps.values() if re.search("--(set (?!gate)|preset|workdir)", command)], (
        "the working directory remembers its settings"
    )
    inspect = words(steps["recognize images without promoting it"].replace("IMAGE", shlex.quote(str(image))))
    recognized = six_digits.command(*inspect)
    assert recognized.returncode == 0, recognized.stderr

    again = six_digits.command(*words(steps["run again with a gate that lets it pass"]))
    assert "is the champion" in again.stdout, again.stdout + again.stderr
    assert "gate.accuracy_floor: 1.0 -> " in again.stderr
    assert (six_digits.workdir / FILE).read_text() == remembered, "a looser gate is for one run"
    for command in (words(steps["promote it anyway"]), promote):
        assert six_digits.command(*command).returncode == 0
        assert six_digits.command("registry", "rollback").returncode == 0


def words(command: str) -> list[str]:
    program, *rest = shlex.split(command)
    assert program == "evernear"
    return rest
