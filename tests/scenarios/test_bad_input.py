"""Invalid input: one error message, an exit code, and no partial results."""

import json
from pathlib import Path

import pytest
from minio import Minio

from tests.scenarios.bench import Bench, write_digits, write_negatives


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, EVERNEAR_TARGET="registry")


def run_failing(bench: Bench, *words: str) -> tuple[int, str]:
    """Check that `evernear run` fails with an error message and publishes nothing."""
    refused = bench.refused("run", "--preset", "quick", *words)
    assert not list(bench.workdir.glob("store/releases/**/*.mar"))
    return refused


def test_config_typo(bench: Bench) -> None:
    assert bench.refused("run", "--set", "train.epoch=3") == (
        2,
        "evernear: No setting 'train.epoch'; did you mean 'train.epochs'?",
    )
    assert not bench.workdir.exists()


def test_missing_folder(bench: Bench) -> None:
    code, message = run_failing(bench)
    assert code == 3
    assert str(bench.directory / "images") in message


def test_relative_folder_is_resolved_in_the_current_directory(bench: Bench) -> None:
    write_digits(bench.directory / "images", labels="3")
    _, message = run_failing(bench, "--source", "folder:images")
    assert "class" in message, "the folder was found, but has too few classes"


def test_invalid_image_file_is_named(bench: Bench) -> None:
    write_digits(bench.directory / "images")
    (bench.directory / "images/1/note.png").write_bytes(b"not a picture")
    code, message = run_failing(bench)
    assert code == 3
    assert "1/note.png" in message


@pytest.mark.slow
def test_corrupt_png_stops_the_run_or_is_skipped_as_configured(bench: Bench) -> None:
    write_digits(bench.directory / "images")
    victim = next((bench.directory / "images/2").iterdir())
    victim.write_bytes(victim.read_bytes()[:60])
    code, message = run_failing(bench)
    assert code == 3
    assert victim.name in message
    left_out = bench.run("--set", "validation.undecodable=warn")
    assert left_out["promoted"]
    assert victim.name in Path(left_out["paths"]["validate.report"]).read_text()


@pytest.mark.slow
def test_removed_class(bench: Bench) -> None:
    write_digits(bench.directory / "images")
    assert bench.run()["promoted"]
    for image in (bench.directory / "images/3").iterdir():
        image.unlink()
    code, message = bench.refused("run", "--preset", "quick")
    assert code == 3
    assert "3" in message
    assert len(list(bench.workdir.glob("store/releases/manifests/*.json"))) == 1


def test_reindex_requires_a_release(bench: Bench) -> None:
    write_digits(bench.directory / "images", per_class=20)
    code, message = bench.refused("reindex", "--preset", "quick")
    assert code == 4
    assert "run `evernear run` first" in message


@pytest.mark.slow
def test_bucket_as_source_and_store(bench: Bench, bucket: str, s3_endpoint: str) -> None:
    """Images and store are in S3, and nothing of the store is on the local disk."""
    bench.environment |= {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "not-a-secret",
        "AWS_REGION": "us-east-1",
    }
    write_digits(bench.directory / "images")
    client = Minio(s3_endpoint.removeprefix("http://"), "tester", "not-a-secret", secure=False, region="us-east-1")
    for image in (bench.directory / "images").glob("*/*.png"):
        client.fput_object(bucket, f"arrivals/{image.parent.name}/{image.name}", str(image))
    words = ("--source", f"s3://{bucket}/arrivals", "--set", f"store=s3://{bucket}/evernear")
    completed = bench.run(*words)
    assert completed["promoted"]
    write_negatives(bench.directory / "more", "negative", range(100))
    for image in (bench.directory / "more/negative").iterdir():
        client.fput_object(bucket, f"arrivals/negative/{image.name}", str(image))
    again = bench.run(*words, command="reindex")
    assert again["promoted"], again["reasons"]
    embedded = json.loads(Path(again["paths"]["embed.embeddings"], "embeddings.json").read_text())
    assert embedded["reused"] > 0
    keys = {item.object_name for item in client.list_objects(bucket, "evernear/", recursive=True)}
    assert any(key.startswith("evernear/embeddings/") for key in keys)
    assert "evernear/releases/champion.json" in keys
    assert not (bench.workdir / "store").exists()
    assert "not-a-secret" not in Path(completed["paths"]["log"]).read_text()


ODD_NAMES = {"0": "\x1b]0;owned\x07", "1": "[red]one", "2": "\u202eowt", "3": "three\nevernear: fine"}


@pytest.mark.slow
def test_any_class_name_can_be_released(bench: Bench) -> None:
    images = bench.directory / "images"
    write_digits(images)
    for label, name in ODD_NAMES.items():
        (images / label).rename(images / name)
    completed = bench.command("run", "--preset", "quick")
    assert completed.returncode == 0, completed.stderr
    output = bench.command("registry", "show", bench.command("registry", "champion").stdout.strip())
    for text in (completed.stdout, completed.stderr, output.stdout):
        assert all(line.isprintable() for line in text.split("\n")), text
    for name in (r"\x1b]0;owned\x07", "[red]one", r"\u202eowt", r"three\nevernear: fine"):
        assert name in output.stdout
