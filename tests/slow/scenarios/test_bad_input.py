"""Invalid input: one error message, an exit code, and no partial results."""

import json
from pathlib import Path

import pytest
from minio import Minio

from evernear.embedding.embeddings import Embeddings
from tests.real.scenarios.workspace import Workspace, write_digits, write_negatives

pytestmark = pytest.mark.slow


def test_bucket_as_source_and_store(workspace: Workspace, bucket: str, s3_endpoint: str) -> None:
    """Images and store are in S3, and nothing of the store is on the local disk."""
    workspace.environment |= {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "not-a-secret",
        "AWS_REGION": "us-east-1",
    }
    write_digits(workspace.directory / "images")
    client = Minio(s3_endpoint.removeprefix("http://"), "tester", "not-a-secret", secure=False, region="us-east-1")
    for image in (workspace.directory / "images").glob("*/*.png"):
        client.fput_object(bucket, f"arrivals/{image.parent.name}/{image.name}", str(image))
    words = ("--source", f"s3://{bucket}/arrivals", "--set", f"store=s3://{bucket}/evernear")
    completed = workspace.run(*words)
    assert completed["promoted"]
    write_negatives(workspace.directory / "more", "negative", range(100))
    for image in (workspace.directory / "more/negative").iterdir():
        client.fput_object(bucket, f"arrivals/negative/{image.name}", str(image))
    again = workspace.run(*words, command="reindex")
    assert again["promoted"], again["reasons"]
    assert Embeddings.open(Path(again["paths"]["embed.embeddings"])).description.reused > 0
    keys = {item.object_name for item in client.list_objects(bucket, "evernear/", recursive=True)}
    assert any(key.startswith("evernear/embeddings/") for key in keys)
    assert "evernear/releases/champion.json" in keys
    assert not (workspace.workdir / "store").exists()
    assert "not-a-secret" not in Path(completed["paths"]["log"]).read_text()


ODD_NAMES = {"0": "\x9b31mowned", "1": "[red]one", "2": "\u202eowt", "3": "three evernear: fine"}


def test_any_class_name_can_be_released(workspace: Workspace) -> None:
    images = workspace.directory / "images"
    write_digits(images)
    for label, name in ODD_NAMES.items():
        (images / label).rename(images / name)
    completed = workspace.command("run", "--preset", "quick")
    assert completed.returncode == 0, completed.stderr
    (release,) = json.loads(workspace.command("registry", "list", "--json").stdout)
    output = workspace.command("registry", "show", release["version"])
    for text in (completed.stdout, completed.stderr, output.stdout):
        assert all(line.isprintable() for line in text.split("\n")), text
    for name in (r"\x9b31mowned", "[red]one", r"\u202eowt", "three evernear: fine"):
        assert name in output.stdout
