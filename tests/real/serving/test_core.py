"""What a worker does: it verifies a release before torch and FAISS read it, and predicts."""

import pickle
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest

from evernear.data.encoded_image import EncodedImage
from evernear.data.preprocess import Pixels, Preprocessing
from evernear.data.reduction import BitDepth
from evernear.embedding.export import NETWORK_FILE, load_network
from evernear.embedding.network import load_torchscript
from evernear.errors import IntegrityError
from evernear.index.search import Gallery
from evernear.release.archive_reader import ReleaseParts
from evernear.serving import core as core_module
from evernear.serving.core import Predictor
from evernear.serving.decoding import decode_image, inspect_image, prepare
from evernear.serving.handler import EmbeddingHandler
from evernear.serving.responses import Prediction, Rejection
from tests import hostile
from tests.deep_png import deep_png
from tests.releases import PackedRelease, forge


@pytest.fixture(scope="module")
def core(parts: ReleaseParts) -> Predictor:
    return Predictor.open(parts)


def test_bad_image_fails_alone_at_any_position(core: Predictor, parts: ReleaseParts) -> None:
    good = [image for image, _ in parts.smoke_queries()]
    alone = [core.predict([image])[0] for image in good]
    assert all(isinstance(answer, Prediction) for answer in alone)
    shuffle = random.Random(0)
    for _ in range(20):
        bad = [b"", b"text", good[0][:40], b"\x89PNG\r\n\x1a\n", Rejection(message="Refused before.")]
        batch = [(number, image) for number, image in enumerate(good)] + [(None, item) for item in bad]
        shuffle.shuffle(batch)
        for (number, _), answer in zip(batch, core.predict([image for _, image in batch]), strict=True):
            if number is None:
                assert isinstance(answer, Rejection)
                assert answer.code == 400
                assert answer.message.endswith(".")
            else:
                assert isinstance(answer, Prediction)
                same = alone[number]
                assert isinstance(same, Prediction)
                assert (answer.pred, answer.unknown) == (same.pred, same.unknown)
                assert answer.dist == pytest.approx(same.dist, abs=1e-4), (
                    "other images in the batch change the prediction"
                )


def test_small_images_are_decoded_first_and_none_after_the_timeout(
    core: Predictor, parts: ReleaseParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses a clock on which a decode takes a second per hundred pixels of width."""
    now_s = 0.0
    widths: list[int] = []

    def reading(file: EncodedImage, shape: Preprocessing) -> Pixels:
        nonlocal now_s
        now_s += file.width_px // 100
        widths.append(file.width_px)
        return decode_image(file, shape)

    monkeypatch.setattr(core_module, "decode_image", reading)
    monkeypatch.setattr(core_module, "time", SimpleNamespace(perf_counter=lambda: now_s))
    (image, query), *_ = parts.smoke_queries()
    large = [hostile.png(width, 10) for width in (900, 500, 700)]
    batch = [large[0], b"no image", image, large[1], large[2], image]
    answers = core.predict_batch(batch, decode_timeout_s=10).responses
    assert widths == [8, 8, 500, 700]
    assert answers[0] == Rejection(
        code=503, type="Overloaded", message="Decoding large images took too long; send the image again."
    )
    assert isinstance(answers[1], Rejection)
    assert answers[1].code == 400
    for place in (2, 5):
        answer = answers[place]
        assert isinstance(answer, Prediction)
        assert answer.pred == query.pred
    assert all(isinstance(answers[place], Prediction) for place in (3, 4))


def test_large_images_are_decoded_together_within_the_memory_of_the_largest(
    parts: ReleaseParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two images that together have at most the pixels allowed, and then the third."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    manifest = parts.manifest.model_copy(update={"max_pixels": 700 * 300})
    predictor = Predictor(
        load_network(parts.directory), Gallery.open(parts.directory, manifest.network_sha256), manifest
    )
    two = Barrier(2)
    decoding: list[int] = []
    peaks: list[int] = []

    def together(file: EncodedImage, shape: Preprocessing) -> Pixels:
        decoding.append(file.pixels)
        if file.width_px < 400:
            two.wait(timeout=60)
        peaks.append(sum(decoding))
        pixels = decode_image(file, shape)
        decoding.remove(file.pixels)
        return pixels

    monkeypatch.setattr(core_module, "decode_image", together)
    answers = predictor.predict([hostile.png(width, 300) for width in (400, 300, 310)])
    assert all(isinstance(answer, Prediction) for answer in answers)
    assert max(peaks) == 610 * 300


def test_accepts_an_empty_batch_and_one_of_bad_images(core: Predictor) -> None:
    assert core.predict([]) == []
    assert all(isinstance(answer, Rejection) for answer in core.predict([b"", b"x"]))


def test_handler_imports_only_packages_of_the_serving_image() -> None:
    script = (
        "import sys, evernear.serving.handler\n"
        "print({'torchvision', 'timm', 'minio', 'scipy', 'sklearn', 'matplotlib', 'torch._dynamo'} & set(sys.modules))"
    )
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert completed.stdout == "set()\n"


@pytest.mark.parametrize("bit_depth", [8, 12, 16])
def test_deep_images_are_read_with_the_bit_depth_of_the_release(
    parts: ReleaseParts, bit_depth: BitDepth, caplog: pytest.LogCaptureFixture
) -> None:
    """In TorchServe's worker, and by way of the preprocessing server; KServe's servers call the
    same function."""
    shape = parts.manifest.preprocessing.model_copy(update={"bit_depth": bit_depth})
    manifest = parts.manifest.model_copy(update={"preprocessing": shape})
    network = load_torchscript(parts.directory / NETWORK_FILE)
    predictor = Predictor(network, Gallery.open(parts.directory, manifest.network_sha256), manifest)
    deep = np.random.default_rng(0).integers(0, 2**bit_depth, (8, 8), dtype=np.uint16)
    image = deep_png(deep)
    seen = predictor.predict_batch([image, prepare(inspect_image(image, 64), shape)]).images
    assert seen is not None
    assert np.array_equal(seen[..., 0], np.stack([deep >> bit_depth - 8] * 2))
    assert caplog.messages == []
    if bit_depth == 8:
        deep[0] = 256
        predictor.predict([deep_png(deep)])
        assert "beyond the 8 bits that the release reads" in caplog.text


def load(archive: Path, directory: Path) -> None:
    """Load a release as a TorchServe worker does, from the directory that Java unpacked the archive
    into."""
    with zipfile.ZipFile(archive) as members:
        members.extractall(directory)
    EmbeddingHandler().initialize(SimpleNamespace(system_properties={"model_dir": str(directory)}))


@pytest.mark.parametrize("name", ["network.pt", "index.faiss", "labels.npy", "index.json", "handler.py"])
def test_replaced_part_is_rejected(release: PackedRelease, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "proof"

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (marker,)

    other = tmp_path / "other.mar"
    with zipfile.ZipFile(release.archive) as old, zipfile.ZipFile(other, "w") as new:
        for member in old.namelist():
            new.writestr(member, pickle.dumps(Payload()) if member == name else old.read(member))
    with pytest.raises(IntegrityError, match=rf"{name} in .* is missing or does not match the manifest\."):
        load(other, tmp_path / "unpacked")
    assert not marker.exists()


def test_replaced_network_is_rejected(release: PackedRelease, tmp_path: Path) -> None:
    """The manifest's list of parts contains the hash of the replacement, but the index that of the
    original."""
    with zipfile.ZipFile(release.archive) as members:
        network = members.read("network.pt")
    replaced = forge(release, tmp_path / "replaced.mar", network_pt=network + b" ")
    with pytest.raises(IntegrityError, match="contains vectors of network"):
        load(replaced.archive, tmp_path / "unpacked")
