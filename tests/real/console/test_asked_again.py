"""An image of the gallery is recognized by the other images, not by itself."""

import shutil
from pathlib import Path

import numpy as np

from evernear.common.store import open_store
from evernear.console.named import answer_of_others
from evernear.embedding.data_loader import embed_images
from evernear.embedding.network import load_torchscript
from evernear.index.description import TOWARD_MEAN
from evernear.index.vectors import move_toward, noise_of_means
from evernear.release.archive_reader import open_release
from evernear.release.registry import Registry
from evernear.serving.core import Predictor
from evernear.serving.decoding import encode_png
from evernear.serving.gallery_images import GalleryImages
from evernear.serving.responses import Neighbor, Prediction
from tests.releases import MakeRelease, System

ASKED = 60


def gallery_of(system: System) -> tuple[np.ndarray, np.ndarray]:
    """The images and labels in the gallery split of the system."""
    blocks = list(system.dataset.blocks("gallery"))
    return np.concatenate([block.images for block in blocks]), np.concatenate([block.labels for block in blocks])


def left_out(gallery: np.ndarray, labels: np.ndarray, query: np.ndarray, row: int) -> tuple[int, float]:
    """The label and the distance of the nearest other image."""
    distances = np.sqrt(np.maximum(2 - 2 * gallery @ query, 0))
    distances[row] = np.inf
    nearest = int(distances.argmin())
    return int(labels[nearest]), float(distances[nearest])


def test_gallery_images_are_asked_without_themselves(system: System, make_release: MakeRelease, tmp_path: Path) -> None:
    shutil.copytree(Path(system.dataset.manifest.store_uri.removeprefix("file://")), tmp_path / "store")
    store = open_store((tmp_path / "store").as_uri())
    packed = make_release()
    Registry(store).publish(packed.archive)
    predictor = Predictor.open(open_release(packed.archive, tmp_path / "release"))
    gallery, release = GalleryImages(store), packed.manifest
    images, labels = gallery_of(system)
    vectors = embed_images(load_torchscript(system.network_dir / "network.pt"), images)
    means = np.stack([vectors[labels == label].mean(axis=0) for label in range(labels.max() + 1)])
    moved = move_toward(vectors, means[labels], noise_of_means(means, np.bincount(labels))[labels], TOWARD_MEAN)
    changed = 0
    for row in range(ASKED):
        file = encode_png(images[row])
        (prediction,) = predictor.predict([file])
        assert isinstance(prediction, Prediction)
        answer = answer_of_others(prediction, file, gallery, release)
        assert answer is not None
        label, distance = left_out(moved, labels, vectors[row], row)
        assert answer.label == system.dataset.labels[label]
        if abs(distance - release.threshold) > 1e-4:
            assert answer.unknown == (distance > release.threshold)
        changed += (answer.label, answer.unknown) != (prediction.pred, prediction.unknown)
    assert changed, "some images are recognized by themselves alone"


def test_image_that_is_not_in_the_gallery_keeps_its_answer(system: System, make_release: MakeRelease) -> None:
    release, store = make_release().manifest, open_store(system.dataset.manifest.store_uri)
    image = encode_png(np.full((8, 8, 1), 7, np.uint8))
    near = (Neighbor(label="1", dist=0.4, row=0), Neighbor(label="1", dist=0.5, row=1))
    prediction = Prediction(pred="1", dist=0.4, unknown=True, neighbors=near, version=release.version)
    answer = answer_of_others(prediction, image, GalleryImages(store), release)
    assert answer == ("1", release.threshold < 0.4)
    alone = prediction.model_copy(update={"neighbors": ()})
    assert answer_of_others(alone, image, GalleryImages(store), release) is None
