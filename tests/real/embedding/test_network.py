"""The network accepts images of any size and includes its normalization."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from evernear.embedding.network import Architecture, EmbeddingNetwork, build_network, choose_patch


def network(
    shape: tuple[int, int, int],
    mean: float = 0.13,
    std: float = 0.3,
    members: int = 1,
    test_time_flip: bool = False,
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
    for row, column in [
        (height // 8, width // 8),
        (height // 2, width // 2),
        (7 * height // 8, 7 * width // 8),
    ]:
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


def test_cost_is_bounded_for_large_images() -> None:
    def cells(side: int) -> int:
        grid_cells: list[int] = []
        embedder = network((side, side, 3))
        first = next(m for m in embedder.modules() if isinstance(m, torch.nn.Conv2d))
        first.register_forward_hook(lambda _m, _i, out: grid_cells.append(out.shape[2] * out.shape[3]))
        embedder(images(1, (side, side, 3)))
        return grid_cells[0]

    assert max(cells(side) for side in (95, 96, 224, 500)) <= 96 * 96
    assert cells(28) == 28 * 28


def test_bfloat16_works_on_a_machine_that_advertises_amx_without_supporting_it() -> None:
    """In a subprocess, because such a machine kills it with SIGILL."""
    script = (
        "import evernear.embedding, torch\n"
        "with torch.autocast('cpu', torch.bfloat16): torch.nn.Linear(256, 128)(torch.zeros(256, 256))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
