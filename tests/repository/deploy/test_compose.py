"""``deploy/compose.yaml``, checked without a Docker daemon."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from evernear import settings
from evernear.cli.app import app
from tests import ROOT

FILE = ROOT / "deploy" / "compose.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
LONG_RUNNING = {name: service for name, service in SERVICES.items() if "restart" in service}


def test_file_matches_the_compose_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(FILE)]
    completed = subprocess.run(command, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_services_wait_for_healthy_dependencies() -> None:
    def waits_for(name: str) -> dict[str, str]:
        return {other: dependency["condition"] for other, dependency in SERVICES[name].get("depends_on", {}).items()}

    assert set(LONG_RUNNING) == {"seaweedfs", "torchserve", "prep"}
    assert waits_for("prep") == {"torchserve": "service_healthy"}
    assert waits_for("torchserve") == {"bucket": "service_completed_successfully"}
    assert waits_for("bucket") == {"seaweedfs": "service_healthy"}
    for name in SERVICES:
        for other, condition in waits_for(name).items():
            assert ("healthcheck" in SERVICES[other]) == (condition == "service_healthy"), (name, other)


@pytest.mark.parametrize("name", SERVICES)
def test_containers_run_with_minimal_privileges(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    if name == "seaweedfs-data":  # it changes the owner of a directory, and exits
        assert (service["cap_add"], service["network_mode"]) == (["CHOWN"], "none")
    else:
        assert service["user"] == "65532:65532"
        assert "cap_add" not in service


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_published_on_loopback_only(name: str) -> None:
    ports = SERVICES[name].get("ports", [])
    assert all(re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port) for port in ports)
    # The service that creates the buckets uses the server's unprotected ports, from inside its
    # network.
    shared = "service:seaweedfs" if name == "bucket" else "none"
    assert SERVICES[name].get("network_mode", "none") in ("none", shared)


def test_secrets_come_from_the_env_file() -> None:
    secret = re.compile(r"KEY|PASSWORD|SECRET|ROOT_USER|TOKEN$")
    for service in SERVICES.values():
        for variable, value in service.get("environment", {}).items():
            if secret.search(variable) and variable != "EVERNEAR_TOKEN_FILE" and value != "/dev/null":
                assert re.fullmatch(r"\$\{[A-Z_]+:\?write it into deploy/\.env\}", value), variable
    example = (ROOT / "deploy" / "env.example").read_text()
    documented = dict(line.split("=", 1) for line in example.splitlines() if line and not line.startswith("#"))
    assert set(documented) == set(re.findall(r"\$\{([A-Z_]+):\?", FILE.read_text()))
    assert set(documented.values()) == {""}
    ignored = subprocess.run(["git", "check-ignore", "-q", "deploy/.env"], cwd=ROOT)
    assert ignored.returncode == 0, "git does not ignore deploy/.env"


@pytest.mark.parametrize("name", ["torchserve", "prep"])
def test_services_use_existing_settings_and_commands(name: str) -> None:
    service = SERVICES[name]
    loaded = settings.load(environment={key: str(value) for key, value in service["environment"].items()})
    assert (loaded.store, str(loaded.workdir)) == ("s3://evernear", "/evernear")
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    for words in (service["command"], service["healthcheck"]["test"][1:]):
        assert words[0] == "evernear"
        assert words[1] in commands
    published = {int(port.split(":")[2]) for port in service["ports"]}
    serving, prep = loaded.serving, loaded.prep
    assert published == ({prep.port} if name == "prep" else {serving.inference_port, serving.metrics_port})


def test_torchserve_waits_for_the_first_release_and_follows_the_champion() -> None:
    """Without --follow, it exits. With a short start period, prep does not start: its dependency is
    unhealthy."""
    torchserve = SERVICES["torchserve"]
    assert "--follow" in torchserve["command"]
    assert torchserve["healthcheck"]["start_period"] == "24h"


def test_images_are_pinned() -> None:
    for service in SERVICES.values():
        if "build" not in service:
            assert re.fullmatch(r"[\w./-]+:[\d.]+@sha256:[0-9a-f]{64}", service["image"])
        else:
            build = service["build"]
            dockerfile = (FILE.parent / build["context"] / build["dockerfile"]).read_text()
            assert all(f"ARG {argument}=" in dockerfile for argument in build.get("args", {}))


def test_servers_may_only_read_releases() -> None:
    server = SERVICES["seaweedfs"]
    assert "identities.sh /tmp/s3.json admin reader\n" in server["command"][0]
    files = {mounted["target"]: COMPOSE["configs"][mounted["source"]]["file"] for mounted in server["configs"]}
    assert {Path(file).name for file in files.values()} == {"identities.sh", "reader.json"}
    policy = json.loads((FILE.parent / files["/setup/reader.json"]).read_text())
    assert {(statement["Action"], statement["Resource"]) for statement in policy["Statement"]} == {
        ("s3:GetObject", "arn:aws:s3:::evernear/releases/*"),
        ("s3:ListBucket", "arn:aws:s3:::evernear"),
    }
