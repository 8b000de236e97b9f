"""A chain of releases, each trained with fewer steps than the one before, on a test split of about 18 images.

Without an anchor, nine such releases were promoted, none was held, and the accuracy on other images fell from 96% to
63%.
"""

from pathlib import Path

import pytest

from tests.scenarios.workspace import Workspace, write_digits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
STEPS = (200, 40, 24, 16, 10, 6)


def test_chain_of_weaker_releases_stops_by_its_fifth_step(tmp_path: Path) -> None:
    write_digits(tmp_path / "images", labels="012345", per_class=42)
    workspace = Workspace(tmp_path, EVERNEAR_GATE__ACCURACY_FLOOR="0", EVERNEAR_TARGET="registry")
    promoted: list[str] = []
    for steps in STEPS:
        few = ("--set", "train.epochs=1", "--set", f"train.min_steps={steps}", "--set", "data.test_fraction=0.1")
        result = workspace.run(*few)
        print(steps, result["state"], result["metrics"].get("accuracy"), result["reasons"])
        if result["state"] == "held":
            break
        promoted.append(result["release"])
    assert result["state"] == "held"
    assert any("budget" in reason or "significantly worse" in reason for reason in result["reasons"])
    anchor = workspace.command("registry", "anchor")
    assert anchor.stdout == f"{promoted[0]}\n"
    assert workspace.command("registry", "champion").stdout == f"{promoted[-1]}\n"
