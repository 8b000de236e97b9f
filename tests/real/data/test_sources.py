import gzip
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from minio import Minio
from PIL import Image

from evernear.common.store import open_store
from evernear.data.preprocess import image_digest
from evernear.errors import DataError, StoreError
from evernear.settings import DataSettings
from tests.dataset_images import write_files
from tests.small_ingest import ingest_small, noted


def test_digits_are_complete(run_ingest, contents) -> None:
    from sklearn.datasets import load_digits  # takes seconds

    manifest = run_ingest("digits")
    images = contents(manifest)
    bunch = load_digits()
    assert manifest.shape == (8, 8, 1)
    assert manifest.labels == tuple("0123456789")
    assert len(images) == 1797
    expected = Counter(
        (str(label), image.astype(int).tobytes()) for label, image in zip(bunch.target, bunch.images, strict=True)
    )
    # 16 becomes 255, and the values 0..16 remain distinct.
    counts = Counter(
        (images.label[digest], np.rint(image[..., 0] / (255 / 16)).astype(int).tobytes())
        for digest, image in images.image.items()
    )
    assert counts == expected
    split_sizes = Counter(images.split.values())
    assert 130 <= split_sizes["test"] <= 230
    assert 130 <= split_sizes["gallery"] <= 230
    assert 55 <= split_sizes["query"] <= 130
    assert run_ingest("digits") == manifest


def write_idx(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    path.write_bytes(header + array.tobytes())


@pytest.fixture
def idx(tmp_path: Path) -> Path:
    """300 training and 50 test images of 4 x 3 pixels in five classes."""
    rng = np.random.default_rng(0)
    directory = tmp_path / "idx"
    directory.mkdir()
    for part, count in (("train", 300), ("t10k", 50)):
        write_idx(directory / f"{part}-images-idx3-ubyte", rng.integers(0, 256, (count, 4, 3), np.uint8))
        write_idx(directory / f"{part}-labels-idx1-ubyte", rng.integers(0, 5, count, np.uint8))
    return directory


def test_idx_files_keep_their_test_images(idx: Path, run_ingest, contents) -> None:
    manifest = run_ingest(f"mnist:{idx}")
    images = contents(manifest)
    assert (manifest.name, manifest.shape, manifest.labels) == ("mnist", (4, 3, 1), tuple("01234"))
    pixels = np.frombuffer((idx / "t10k-images-idx3-ubyte").read_bytes()[16:], np.uint8).reshape(-1, 4, 3)
    labels = (idx / "t10k-labels-idx1-ubyte").read_bytes()[8:]
    for image, label in zip(pixels, labels, strict=True):
        digest = image_digest(Image.fromarray(image))
        assert images.split[digest] == "test"
        assert images.label[digest] == str(label)
        assert (images.image[digest][..., 0] == image).all()
    assert Counter(images.split.values())["test"] == 50
    assert set(images.split.values()) == {"train", "test", "gallery", "query"}


def test_idx_images_can_be_resized(idx: Path, run_ingest, contents) -> None:
    same = contents(run_ingest(f"mnist:{idx}"))
    other = contents(run_ingest(f"mnist:{idx}", dataset="other", size_px=8))
    assert other.split == same.split
    assert next(iter(other.image.values())).shape[:2] == (8, 8)


@pytest.mark.parametrize("fault", ["absent", "short", "words", "other labels", "broken gzip"])
def test_broken_idx_files_are_named(idx: Path, run_ingest, tmp_path: Path, fault: str) -> None:
    images, labels = idx / "train-images-idx3-ubyte", idx / "train-labels-idx1-ubyte"
    match fault:
        case "absent":
            images.unlink()
        case "short":
            images.write_bytes(images.read_bytes()[:-1])
        case "words":
            images.write_bytes(b"these are words")
        case "other labels":
            write_idx(labels, np.zeros(299, np.uint8))
        case _:
            images.rename(f"{images}.gz")
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):
        run_ingest(f"mnist:{idx}")
    assert not (tmp_path / "store" / "datasets" / "mnist" / "head.json").exists()


@pytest.fixture
def mirror(idx: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HTTPServer]:
    """The only mirror of MNIST that torchvision uses, with small files; the cache is empty."""
    from torchvision.datasets import MNIST

    resources: list[tuple[str, str]] = []
    for path in sorted(idx.iterdir()):
        data = gzip.compress(path.read_bytes())
        path.with_name(f"{path.name}.gz").write_bytes(data)
        resources.append((f"{path.name}.gz", hashlib.md5(data).hexdigest()))  # noqa: S324 - torchvision's choice
    monkeypatch.setattr(MNIST, "resources", resources)
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    handler = partial(SimpleHTTPRequestHandler, directory=idx)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        threading.Thread(target=server.serve_forever).start()
        yield server
        server.shutdown()


def test_mnist_is_downloaded_once(run_ingest, idx: Path, mirror: HTTPServer, monkeypatch) -> None:
    manifest = run_ingest("mnist")
    assert manifest.digest == run_ingest(f"mnist:{idx}", dataset="direct").digest
    monkeypatch.setattr("torchvision.datasets.MNIST.mirrors", [])
    assert run_ingest("mnist") == manifest


@pytest.mark.parametrize("fault", ["no answer", "other content"])
def test_failed_download_is_reported_and_leaves_no_files(run_ingest, idx, mirror, monkeypatch, tmp_path, fault) -> None:
    if fault == "no answer":
        monkeypatch.setattr("torchvision.datasets.MNIST.mirrors", ["http://127.0.0.1:9/"])
    else:
        (idx / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"something else"))
    with pytest.raises(DataError, match=r"MNIST cannot be downloaded .* pass a directory that contains it"):
        run_ingest("mnist")
    assert list((tmp_path / "cache" / "evernear").iterdir()) == []


# Buckets


def upload(bucket: str, tree: Path, prefix: str) -> str:
    """Put all files of ``tree`` into the bucket, also those whose keys a `Store` rejects."""
    for path in filter(Path.is_file, tree.rglob("*")):
        client().fput_object(bucket, f"{prefix}/{path.relative_to(tree).as_posix()}", str(path))
    return f"s3://{bucket}/{prefix}"


def client() -> Minio:
    """A client that accepts keys that a `Store` rejects."""
    host = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    return Minio(host, "tester", "not-a-secret", secure=False, region="us-east-1")


def test_bucket_and_tree_give_the_same_dataset(tree, run_ingest, bucket: str, make_image) -> None:
    names = (".net/1.png", ".net/deeper/2.png", "1/.thumbs/3.png", "1/._4.png", ".git/config")
    write_files(tree, {name: make_image(len(name)) for name in names})
    write_files(tree, {"1/words.png": b"no image", "2/notes.txt": b"notes"})
    image = min((tree / "2").glob("*.png"))
    image.rename(image.with_suffix(""))
    local = run_ingest(tree)
    source = upload(bucket, tree, "some/images")
    for key in ("some/images/", "some/images/1/"):  # as the S3 console creates folders
        client().put_object(bucket, key, BytesIO(), 0)
    remote = run_ingest(source)
    assert remote.name == f"{bucket}-some-images"
    assert remote.digest == local.digest
    assert noted(remote, "undecodable") == ["1/words.png"]
    assert noted(remote, "hidden_folder") == [".net"]
    assert noted(remote, "litter") == [".git", "1/._4.png", "1/.thumbs"]


def test_bucket_is_ingested_incrementally_into_s3(tree, bucket: str, make_image, contents, digest_of) -> None:
    values = DataSettings(source=upload(bucket, tree, "images"))
    images = open_store(values.source)
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
    names = ["a b", "a+b", "100%", "%41", "what?", "h#x", "am&p", "\xfc\u732b", "it's", "<lt>", "back\\slash"]
    if "TEST_S3_URL" not in os.environ:  # MinIO rejects both, SeaweedFS the second
        names += ["d//ouble", "x" * 500]
    images = client()
    for number, name in enumerate(names * 2):
        data = make_image(number)
        images.put_object(bucket, f"some #1?/{number // len(names)}/{name}.png", BytesIO(data), len(data))
    manifest = run_ingest(f"s3://{bucket}/some #1?")
    assert len(contents(manifest)) == 2 * len(names)
    assert manifest.problem_counts == {}


def test_empty_or_missing_bucket_is_reported(run_ingest, bucket: str) -> None:
    with pytest.raises(DataError, match=f"s3://{bucket}/images contains no image in a class folder"):
        run_ingest(f"s3://{bucket}/images")
    with pytest.raises(StoreError, match=r"The bucket .* does not exist"):
        run_ingest(f"s3://{bucket}-missing")
