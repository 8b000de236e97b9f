import gzip
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from evernear.data.preprocess import image_digest
from evernear.errors import DataError
from tests import ROOT


def test_digits_are_complete(run_ingest, contents) -> None:
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


def test_idx_image_in_both_parts_is_held_out(idx: Path, run_ingest, contents) -> None:
    train = bytearray((idx / "train-images-idx3-ubyte").read_bytes())
    test = (idx / "t10k-images-idx3-ubyte").read_bytes()
    train[16 : 16 + 12] = test[16 : 16 + 12]
    (idx / "train-images-idx3-ubyte").write_bytes(train)
    labels = bytearray((idx / "train-labels-idx1-ubyte").read_bytes())
    labels[8] = (idx / "t10k-labels-idx1-ubyte").read_bytes()[8]
    (idx / "train-labels-idx1-ubyte").write_bytes(labels)
    manifest = run_ingest(f"mnist:{idx}")
    assert manifest.count("test") == 50
    assert manifest.problem_counts == {"duplicate_across_splits": 1}
    assert manifest.problems[0].names == ("t10k[0]", "train[0]")


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


MNIST = ROOT.parent / "shared/data/mnist"


@pytest.mark.skipif(not MNIST.is_dir(), reason="the full MNIST is not here")
def test_mnist_is_ingested_completely(run_ingest) -> None:
    before_s = time.process_time()  # unlike the wall time, it does not grow with the load of the machine
    manifest = run_ingest(f"mnist:{MNIST}", shard_size_bytes=2**25)
    took_s = time.process_time() - before_s
    assert manifest.shape == (28, 28, 1)
    assert manifest.count("test") == 10_000
    assert sum(manifest.count(split) for split in ("train", "gallery", "query")) == 60_000
    assert abs(manifest.count("gallery") - 6000) < 300
    assert manifest.problem_counts == {}
    assert manifest.label_counts("test")["7"] == 1028
    assert took_s < 60  # measured: 2 s; only per-image processing would exceed this bound


@pytest.fixture
def mirror(idx: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HTTPServer]:
    """A mirror of small MNIST files with their checksums, the only one that torchvision uses; the
    cache is empty."""
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
def test_failed_download_is_reported_and_leaves_no_files(
    run_ingest, idx: Path, mirror: HTTPServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    if fault == "no answer":
        monkeypatch.setattr("torchvision.datasets.MNIST.mirrors", ["http://127.0.0.1:9/"])
    else:
        (idx / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"something else"))
    with pytest.raises(DataError, match=r"MNIST cannot be downloaded .* pass a directory that contains it"):
        run_ingest("mnist")
    assert list((tmp_path / "cache" / "evernear").iterdir()) == []
