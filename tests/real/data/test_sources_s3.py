import os
from io import BytesIO
from pathlib import Path

import pytest
from minio import Minio

from evernear.common.store import Store, open_store
from evernear.errors import DataError, StoreError
from evernear.settings import DataSettings
from tests.small_ingest import ingest_small


def upload(bucket: str, tree: Path, prefix: str) -> Store:
    store = open_store(f"s3://{bucket}/{prefix}")
    for path in filter(Path.is_file, tree.rglob("*")):
        store.put(path.relative_to(tree).as_posix(), path)
    return store


def client() -> Minio:
    """A client that accepts keys that a `Store` rejects."""
    host = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    return Minio(host, "tester", "not-a-secret", secure=False, region="us-east-1")


def test_bucket_and_tree_give_the_same_dataset(tree, run_ingest, bucket: str, contents) -> None:
    (tree / "1" / "words.png").write_text("no image")
    (tree / "2" / "notes.txt").write_text("notes")
    image = min((tree / "2").glob("*.png"))
    image.rename(image.with_suffix(""))
    local = run_ingest(tree)
    upload(bucket, tree, "some/images")
    remote = run_ingest(f"s3://{bucket}/some/images")
    assert remote.name == f"{bucket}-some-images"
    assert remote.digest == local.digest
    assert remote.problems[0].names == ("1/words.png",)


def test_folder_objects_of_a_bucket_are_ignored(tree, run_ingest, bucket: str) -> None:
    upload(bucket, tree, "images")
    for key in ("images/", "images/1/"):  # as the S3 console creates them
        client().put_object(bucket, key, BytesIO(), 0)
    assert run_ingest(f"s3://{bucket}/images").digest == run_ingest(tree).digest


def test_hidden_class_folders_of_a_bucket_are_named(tree, run_ingest, bucket: str, make_image) -> None:
    for name in (".net/1.png", ".net/deeper/2.png", "1/.thumbs/3.png", "1/._4.png", ".git/config"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(make_image(len(name)))
    local = run_ingest(tree)
    images = client()
    for path in tree.rglob("*"):
        if path.is_file():
            images.fput_object(bucket, f"images/{path.relative_to(tree).as_posix()}", str(path))
    remote = run_ingest(f"s3://{bucket}/images")
    assert remote.digest == local.digest
    assert [problem.names for problem in remote.problems if problem.kind == "hidden_folder"] == [(".net",)]
    assert [name for problem in remote.problems if problem.kind == "litter" for name in problem.names] == [
        ".git",
        "1/._4.png",
        "1/.thumbs",
    ]


def test_bucket_is_ingested_incrementally_into_s3(tree, bucket: str, make_image, contents, digest_of) -> None:
    images = upload(bucket, tree, "images")
    values = DataSettings(source=f"s3://{bucket}/images")
    first = ingest_small(values, f"s3://{bucket}/store")
    assert ingest_small(values, f"s3://{bucket}/store") == first
    images.put("2/new.png", make_image(1000))
    images.delete("1/000.png")
    second = ingest_small(values, f"s3://{bucket}/store")
    old, new = contents(first), contents(second)
    assert set(new.split) - set(old.split) == {digest_of(make_image(1000))}
    assert set(old.split) - set(new.split) == {digest_of(make_image(0))}
    slash = values.model_copy(update={"source": f"s3://{bucket}/images/"})
    assert ingest_small(slash, f"s3://{bucket}/store") == second


def test_unusual_keys_are_read(run_ingest, make_image, bucket: str, contents) -> None:
    names = [
        "a b",
        "a+b",
        "100%",
        "%41",
        "what?",
        "h#x",
        "am&p",
        "\xfc\u732b",
        "it's",
        "<lt>",
        "back\\slash",
    ]
    if "TEST_S3_URL" not in os.environ:  # MinIO rejects both, SeaweedFS the second
        names += ["d//ouble", "x" * 500]
    images = client()
    for number, name in enumerate(names * 2):
        data = make_image(number)
        images.put_object(bucket, f"some #1?/{number // len(names)}/{name}.png", BytesIO(data), len(data))
    manifest = run_ingest(f"s3://{bucket}/some #1?")
    assert len(contents(manifest)) == 2 * len(names)
    assert manifest.problem_counts == {}


def test_bucket_with_explicit_splits(tmp_path: Path, run_ingest, make_image, bucket: str, contents, digest_of) -> None:
    store = open_store(f"s3://{bucket}")
    tests: set[bytes] = set()
    for number in range(60):
        split = "test" if number % 3 == 0 else "train"
        store.put(f"{split}/{'ab'[number % 2]}/{number}.png", make_image(number))
        if split == "test":
            tests.add(digest_of(make_image(number)))
    images = contents(run_ingest(f"s3://{bucket}"))
    assert {digest for digest, split in images.split.items() if split == "test"} == tests


def test_empty_or_missing_bucket_is_reported(run_ingest, bucket: str) -> None:
    with pytest.raises(DataError, match=f"s3://{bucket}/images contains no image in a class folder"):
        run_ingest(f"s3://{bucket}/images")
    with pytest.raises(StoreError, match=r"The bucket .* does not exist"):
        run_ingest(f"s3://{bucket}-missing")
