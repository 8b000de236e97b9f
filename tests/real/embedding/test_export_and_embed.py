"""TorchScript export, and embeddings of whole splits."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from evernear.data.shards import Dataset
from evernear.embedding import embeddings as embeddings_module
from evernear.embedding.artifact import TrainedNetwork, load_trained, save_trained
from evernear.embedding.data_loader import embed_images, to_tensor
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import describe_network, export_network, load_network, whiten_network
from evernear.embedding.network import Architecture, build_network, load_torchscript, to_torchscript
from evernear.embedding.recipe import with_defaults
from evernear.errors import IntegrityError, TrainingError
from evernear.settings import TrainSettings


def test_the_exported_network_matches_the_trained_one(digits: Dataset, trained_dir: Path, network_dir: Path) -> None:
    images = to_tensor(next(digits.blocks("test")).images)
    trained, loaded = load_trained(trained_dir)
    eager = whiten_network(loaded, trained.architecture.embedding_dim, digits, ())
    network = load_network(network_dir)
    with torch.inference_mode():
        for count in (1, 7, 64):
            torch.testing.assert_close(network(images[:count]), eager(images[:count]), atol=1e-5, rtol=0)
    described = describe_network(network_dir)
    assert 0 <= described.parity_max_abs_difference <= 1e-4
    assert described.parity_images > 50
    assert (described.preprocessing.height_px, described.preprocessing.channels) == (8, 1)
    assert described.preprocessing.bit_depth == digits.manifest.bit_depth == 16


def test_vectors_are_white_within_the_included_classes_of_the_train_split(digits: Dataset, trained_dir: Path) -> None:
    trained, network = load_trained(trained_dir)
    with torch.inference_mode():
        train = [(network.eval()(to_tensor(b.images)).numpy(), b.labels) for b in digits.blocks("train")]
    vectors, labels = (np.concatenate(column) for column in zip(*train, strict=True))
    for excluded in ([], [0, 3]):
        included = [label for label in range(len(digits.labels)) if label not in excluded]
        names = [digits.labels[label] for label in excluded]
        last = whiten_network(network, trained.architecture.embedding_dim, digits, names).standardize
        np.testing.assert_allclose(last.mean.numpy(), class_means(vectors, labels, included).mean(axis=0), atol=1e-5)
        whitened = (vectors - last.mean.numpy()) @ last.matrix.numpy()
        assert spread_within(whitened, labels, included) < 0.5 * spread_within(vectors, labels, included)


def class_means(vectors: np.ndarray, labels: np.ndarray, included: list[int]) -> np.ndarray:
    return np.stack([vectors[labels == label].mean(axis=0) for label in included])


def spread_within(vectors: np.ndarray, labels: np.ndarray, included: list[int]) -> float:
    """The largest variance within classes relative to the median over directions; 1 if white."""
    pairs = zip(included, class_means(vectors, labels, included), strict=True)
    variances = np.linalg.eigvalsh(np.cov(np.concatenate([vectors[labels == label] - mean for label, mean in pairs]).T))
    return float(variances.max() / np.median(variances))


def test_export_rejects_a_difference_above_the_tolerance(digits: Dataset, trained_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="differs from the trained one"):
        export_network(trained_dir, digits, tmp_path, tolerance=1e-12)
    assert list(tmp_path.iterdir()) == []


def test_export_rejects_outputs_that_are_not_finite(digits: Dataset, trained_dir: Path, tmp_path: Path) -> None:
    trained, network = load_trained(trained_dir)
    damaged = network.state_dict()
    damaged["members.0.project.weight"].fill_(float("nan"))
    save_trained(tmp_path / "t", damaged, trained)
    with pytest.raises(TrainingError, match="differs from the trained one by nan"):
        export_network(tmp_path / "t", digits, tmp_path / "n")


def test_export_rejects_a_network_for_images_of_another_shape(digits: Dataset, tmp_path: Path) -> None:
    architecture = Architecture(shape=(9, 9, 3), mean=(0.5,) * 3, std=(0.5,) * 3, patch_px=1, width=4, embedding_dim=16)
    trained = TrainedNetwork(
        architecture=architecture,
        dataset_digest=digits.digest,
        exclude_labels=(),
        recipe=with_defaults(TrainSettings(), digits),
    )
    save_trained(tmp_path, build_network(architecture).state_dict(), trained)
    with pytest.raises(IntegrityError, match=r"takes images of \(9, 9, 3\)"):
        export_network(tmp_path, digits, tmp_path / "n")


def test_load_rejects_a_changed_network(network_dir: Path, tmp_path: Path) -> None:
    data = bytearray((network_dir / "network.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "network.pt").write_bytes(data)
    (tmp_path / "network.json").write_bytes((network_dir / "network.json").read_bytes())
    with pytest.raises(IntegrityError, match=r"is missing or does not match network\.json"):
        load_network(tmp_path)


def test_load_rejects_a_file_that_is_not_torchscript(tmp_path: Path) -> None:
    (tmp_path / "network.pt").write_bytes(b"no network")
    with pytest.raises(IntegrityError, match="is not a TorchScript network"):
        load_torchscript(tmp_path / "network.pt")


@pytest.mark.parametrize(("shape", "members"), [((28, 28, 1), 1), ((50, 41, 3), 2), ((224, 224, 3), 1)], ids=str)
def test_scripted_networks_of_any_shape_match_eager(shape: tuple[int, int, int], members: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    channels = shape[2]
    architecture = Architecture(
        shape=shape,
        mean=(0.4,) * channels,
        std=(0.2,) * channels,
        patch_px=3,
        width=4,
        embedding_dim=16,
        members=members,
    )
    eager = build_network(architecture)
    pixels = torch.randint(0, 256, (4, channels, *shape[:2]), dtype=torch.uint8)
    eager.train()(pixels)  # move the running statistics away from 0 and 1
    (tmp_path / "n.pt").write_bytes(to_torchscript(eager))
    with torch.inference_mode():
        scripted = load_torchscript(tmp_path / "n.pt")(pixels)
        torch.testing.assert_close(scripted, eager.eval()(pixels), atol=1e-5, rtol=0)


def test_embeddings_have_the_order_labels_and_digests_of_the_dataset(digits, network_dir, tmp_path) -> None:
    described = embed_dataset(network_dir, digits, tmp_path, batch_size=50)
    embeddings = Embeddings.open(tmp_path)
    assert embeddings.network_sha256 == describe_network(network_dir).sha256
    assert described.dataset_digest == digits.digest
    network = load_network(network_dir)
    for split in ("gallery", "query"):
        stored = list(embeddings.blocks(split))
        vectors = np.concatenate([block.embeddings for block in stored])
        assert embeddings.count(split) == len(vectors) == digits.count(split)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        blocks = list(digits.blocks(split))
        expected = embed_images(network, np.concatenate([block.images for block in blocks]))
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
        for name in ("labels", "digests"):
            ours = np.concatenate([getattr(block, name) for block in stored])
            np.testing.assert_array_equal(ours, np.concatenate([getattr(block, name) for block in blocks]))
    assert embeddings.count("test") == 0


def test_embeddings_are_read_in_blocks_of_a_bounded_size(digits, network_dir, tmp_path, monkeypatch) -> None:
    embed_dataset(network_dir, digits, tmp_path, ("gallery",))
    (whole,) = Embeddings.open(tmp_path).blocks("gallery")
    monkeypatch.setattr(embeddings_module, "BLOCK_SIZE", 100)
    blocks = list(Embeddings.open(tmp_path).blocks("gallery"))
    total = digits.count("gallery")
    assert [len(block.labels) for block in blocks] == [100] * (total // 100) + [total % 100]
    np.testing.assert_array_equal(np.concatenate([block.digests for block in blocks]), whole.digests)


def test_open_rejects_a_changed_shard(digits: Dataset, network_dir: Path, tmp_path: Path) -> None:
    described = embed_dataset(network_dir, digits, tmp_path, ("query",))
    shard = tmp_path / described.shards[0].file
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0\0")
    with pytest.raises(IntegrityError, match="changed since it was written"):
        Embeddings.open(tmp_path)


def test_open_rejects_a_directory_without_embeddings(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=r"Cannot read .*embeddings\.json.*; run the embed step again"):
        Embeddings.open(tmp_path)


def test_embed_rejects_a_network_for_images_of_another_shape(digits: Dataset, network_dir: Path, tmp_path) -> None:
    described = json.loads((network_dir / "network.json").read_text())
    described["preprocessing"]["width_px"] = 9
    (tmp_path / "network.json").write_text(json.dumps(described))
    with pytest.raises(IntegrityError, match="takes images of 8x9x1"):
        embed_dataset(tmp_path, digits, tmp_path / "out")
