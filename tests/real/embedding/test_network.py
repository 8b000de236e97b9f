"""The network accepts images of any size and includes its normalization."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from evernear.embedding import network as network_module
from evernear.embedding.network import Architecture, EmbeddingNetwork, build_network, choose_patch
from evernear.embedding.train import train_network


def network(
    shape: tuple[int, int, int], mean: float = 0.13, std: float = 0.3, members: int = 1, test_time_flip: bool = False
) -> EmbeddingNetwork:
    torch.manual_seed(0)
    channels = shape[2]
    architecture = Architecture(
        shape=shape,
        mean=(mean,) * channels,
        std=(std,) * channels,
        patch_px=choose_patch(*shape[:2]),
        width=4,
        embedding_dim=16,
        members=members,
        test_time_flip=test_time_flip,
    )
    return build_network(architecture).eval()


def images(count: int, shape: tuple[int, int, int]) -> torch.Tensor:
    height, width, channels = shape
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8)


SHAPES = [(1, 1, 1), (3, 2, 3), (8, 8, 1), (28, 28, 1), (20, 61, 3), (97, 130, 3), (224, 224, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_images_of_any_shape_map_to_unit_vectors(shape: tuple[int, int, int]) -> None:
    embeddings = network(shape)(images(3, shape))
    assert embeddings.shape == (3, 16)
    assert embeddings.dtype == torch.float32
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(3))


@pytest.mark.parametrize("shape", SHAPES[3:], ids=str)
def test_every_region_of_an_image_affects_its_embedding(shape: tuple[int, int, int]) -> None:
    embedder, image = network(shape), images(1, shape)
    height, width, _ = shape
    for row, column in [(height // 8, width // 8), (height // 2, width // 2), (7 * height // 8, 7 * width // 8)]:
        changed = image.clone()
        changed[:, :, row : row + 2, column : column + 2] ^= 255
        assert (embedder(changed) - embedder(image)).abs().max() > 1e-6


def test_the_network_normalizes_its_input() -> None:
    shape = (12, 12, 3)
    pixels = images(5, shape)
    plain = network(shape, mean=0.0, std=1.0)
    normalized = (pixels.float() / 255 - 0.13) / 0.3 * 255
    torch.testing.assert_close(network(shape)(pixels), plain(normalized))


def test_batch_size_does_not_affect_embeddings() -> None:
    shape = (28, 28, 1)
    embedder, pixels = network(shape), images(9, shape)
    together = embedder(pixels)
    alone = torch.cat([embedder(pixels[i : i + 1]) for i in range(9)])
    torch.testing.assert_close(alone, together, atol=1e-6, rtol=0)


def test_similarity_of_an_ensemble_is_the_mean_of_its_members() -> None:
    shape = (28, 28, 1)
    ensemble, pixels = network(shape, members=4), images(9, shape)
    embeddings = ensemble(pixels)
    assert embeddings.shape == (9, 16)
    parts = torch.stack([part / part.norm(dim=1, keepdim=True) for part in embeddings.chunk(4, dim=1)])
    assert (parts[0] - parts[1]).abs().max() > 0.1
    torch.testing.assert_close(embeddings @ embeddings.T, (parts @ parts.mT).mean(dim=0), atol=1e-6, rtol=0)


def test_test_time_flip_averages_an_image_and_its_mirror_image() -> None:
    shape = (12, 15, 3)
    pixels, plain, averaged = images(4, shape), network(shape), network(shape, test_time_flip=True)
    mean = F.normalize(plain(pixels) + plain(pixels.flip(-1)))
    assert torch.allclose(averaged(pixels), mean, atol=1e-6)
    assert torch.allclose(averaged(pixels), averaged(pixels.flip(-1)), atol=1e-6)
    assert torch.allclose(averaged.train()(pixels), plain.train()(pixels)), "training augments with flips instead"


# The memory of activations


def architecture(side: int) -> Architecture:
    return Architecture(shape=(side, side, 3), mean=(0.5,) * 3, std=(0.2,) * 3, patch_px=1, width=4, embedding_dim=16)


def test_a_larger_batch_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_module, "INFERENCE_BYTES", 2**20)
    network = build_network(architecture(32)).eval()
    assert 1 < network.max_batch_size < 50
    images = torch.randint(0, 256, (50, 3, 32, 32), dtype=torch.uint8)
    sizes: list[int] = []
    network.members[0].register_forward_hook(lambda _m, inputs, _o: sizes.append(len(inputs[0])))
    embeddings = network(images)
    assert sum(sizes) == 50
    assert max(sizes) == network.max_batch_size
    torch.testing.assert_close(embeddings, torch.cat([network(image[None]) for image in images]), atol=1e-6, rtol=0)


def test_larger_images_are_processed_in_smaller_batches() -> None:
    cpu = torch.device("cpu")
    small, large = build_network(architecture(16)), build_network(architecture(32))
    examples = [torch.zeros((1, 3, side, side), dtype=torch.uint8) for side in (16, 32)]
    assert 3.5 < small.max_batch_size / large.max_batch_size < 4.5
    training = [network_module.training_batch_size(*case, cpu) for case in zip((small, large), examples, strict=True)]
    assert 3.5 < training[0] / training[1] < 4.5


def test_a_batch_beyond_the_limit_is_one_step_of_several_micro_batches(digits, tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(network_module, "TRAINING_BYTES", 2**17)
    sizes: list[int] = []
    forward = EmbeddingNetwork.forward

    def recording_forward(self: EmbeddingNetwork, images: Tensor) -> Tensor:
        if self.training:
            sizes.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(EmbeddingNetwork, "forward", recording_forward)
    result = train_network(digits, tiny.model_copy(update={"epochs": 8}), tmp_path)
    assert max(sizes) <= 64
    assert sum(sizes) % tiny.batch_size == 0
    assert result.epochs[-1].train_loss < result.epochs[0].train_loss
