"""A chain of releases, each of a weaker network than the one before, on a test split of about 20
images.

Without an anchor, nine such releases were promoted, none was held, and the accuracy on other images
fell from 96% to 63%.
"""

import json
from pathlib import Path

import pytest

from tests.real.scenarios.workspace import Workspace, write_digits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
NETWORKS = ((16, 16, 200), (4, 2, 200), (4, 2, 40), (4, 2, 20), (2, 2, 10), (2, 2, 5))
"""Width, dimension of the embeddings, and training steps."""


def test_chain_of_weaker_releases_stops_by_its_fifth_step(tmp_path: Path) -> None:
    write_digits(tmp_path / "images", labels="012345", per_class=42)
    workspace = Workspace(tmp_path, EVERNEAR_GATE__ACCURACY_FLOOR="0", EVERNEAR_TARGET="registry")
    promoted: list[str] = []
    for width, dim, steps in NETWORKS:
        network = (f"train.width={width}", f"train.embedding_dim={dim}", f"train.min_steps={steps}")
        chosen = ("train.epochs=1", "data.test_fraction=0.1", *network)
        result = workspace.run(*(word for setting in chosen for word in ("--set", setting)))
        print(network, result["state"], result["metrics"].get("accuracy"), result["reasons"])
        if result["state"] == "held":
            break
        promoted.append(result["release"])
    assert result["state"] == "held"
    assert any("budget" in reason or "significantly worse" in reason for reason in result["reasons"])
    anchor = workspace.command("registry", "anchor")
    assert anchor.stdout == f"{promoted[0]}\n"
    moves = json.loads(workspace.command("registry", "list", "--history", "--json").stdout)
    assert moves[-1]["version"] == promoted[-1]
