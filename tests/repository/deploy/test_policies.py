"""checkov's policies pass, offline, for every overlay with the objects that the deploy step
adds."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests import ROOT
from tests.repository.deploy.rendered import PARTS, named, objects, serving

CHECKOV = ROOT / ".venv/checkov/bin/checkov"
CONFIG = Path(__file__).with_name("checkov.yaml")


@pytest.mark.slow
def test_checkov_finds_only_the_planted_violation(tmp_path: Path) -> None:
    if not CHECKOV.exists():
        pytest.skip("checkov is not installed; `make .venv/checkov/.installed` installs it")
    for number, part in enumerate(PARTS):
        rendered = objects(part)
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump_all([*rendered, *serving(rendered)]))
    broken = named(objects("local"), "Deployment")["evernear-prep"]
    broken["metadata"]["name"] = "broken"
    del broken["spec"]["template"]["spec"]["containers"][0]["securityContext"]["capabilities"]
    (tmp_path / "broken.yaml").write_text(yaml.safe_dump(broken))

    command = [str(CHECKOV), "--directory", str(tmp_path), "--config-file", str(CONFIG)]
    completed = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HOME": str(tmp_path)})
    report = json.loads(completed.stdout)

    failed = {(check["resource"], check["check_id"]) for check in report["results"]["failed_checks"]}
    assert {resource for resource, _ in failed} == {"Deployment.evernear.broken"}, failed
    assert ("Deployment.evernear.broken", "CKV_K8S_37") in failed, "checkov no longer checks capabilities"
    assert report["summary"]["parsing_errors"] == 0
    assert report["summary"]["passed"] > 1000
    deployments = {name for part in PARTS for name in named([*objects(part), *serving(objects(part))], "Deployment")}
    checked = {check["resource"].rpartition(".")[2] for check in report["results"]["passed_checks"]}
    assert deployments <= checked
