"""The scripts of image.yml, run as on GitHub, and the permissions of its steps."""

import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests import ROOT

JOB = yaml.safe_load((ROOT / ".github/workflows/image.yml").read_text())["jobs"]["image"]
DIGEST = "ab" * 32
GH = f"""#!/bin/sh
echo "$@" >> "$CALLS"
[ -n "$ATTESTED" ] || {{ echo "no attestations found" >&2; exit 1; }}
echo {DIGEST}
"""


def step(**entries: str) -> dict[str, Any]:
    """The only step with these entries; actions are matched by name."""
    (match,) = [item for item in JOB["steps"] if all(item.get(key, "").startswith(entries[key]) for key in entries)]
    return match


def run_step(tmp_path: Path, entries: dict[str, Any], **variables: str) -> str:
    """Run the script of a step and return its outputs for later steps."""
    gh = tmp_path / "gh"
    gh.write_text(GH)
    gh.chmod(0o755)
    output = tmp_path / "output"
    output.write_text("")
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "IMAGE": "ghcr.io/owner/evernear-train",
        "GITHUB_OUTPUT": str(output),
        "GITHUB_ENV": str(output),
        "GITHUB_REPOSITORY": "owner/evernear",
        "GITHUB_REF": "refs/heads/main",
        "GITHUB_SHA": "5b67dc9f",
    }
    (tmp_path / "step.sh").write_text(entries["run"])
    subprocess.run(["bash", "-e", tmp_path / "step.sh"], env=environment | variables, check=True)
    return output.read_text()


def test_rebuilt_commit_reuses_its_image(tmp_path: Path) -> None:
    """Another digest would change the pipeline under the same version, which the upload rejects."""
    earlier = step(id="earlier")
    assert run_step(tmp_path, earlier, ATTESTED="") == ""
    assert run_step(tmp_path, earlier, ATTESTED="yes") == f"digest=sha256:{DIGEST}\n"
    calls = (tmp_path / "calls").read_text()
    assert "oci://ghcr.io/owner/evernear-train:sha-5b67dc9f" in calls
    assert "--source-ref refs/heads/main --source-digest 5b67dc9f" in calls
    assert "--signer-workflow owner/evernear/.github/workflows/image.yml" in calls

    new = "steps.earlier.outputs.digest == ''"
    skipped = (step(id="build"), step(run="cosign sign"), step(uses="actions/attest-build-provenance"))
    assert [item.get("if") for item in skipped] == [new] * len(skipped)
    assert step(id="reference")["env"]["DIGEST"] == "${{ steps.earlier.outputs.digest || steps.build.outputs.digest }}"


def test_image_name_is_lowercase(tmp_path: Path) -> None:
    lowercase = next(item for item in JOB["steps"] if "GITHUB_ENV" in item.get("run", ""))
    output = run_step(tmp_path, lowercase, IMAGE="ghcr.io/Some-Owner/evernear-train")
    assert output == "IMAGE=ghcr.io/some-owner/evernear-train\n"


def test_sbom_is_not_attached_to_releases() -> None:
    """The action would otherwise try this for each tag with a release, and fail for lack of
    permission."""
    assert JOB["permissions"]["contents"] == "read"
    assert step(uses="anchore/sbom-action")["with"]["upload-release-assets"] is False
