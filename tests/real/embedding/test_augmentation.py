"""Random augmentation is bounded, reproducible and correct for images that are not square."""

import pytest
import torch

from evernear.embedding import augmentation
from evernear.embedding.augmentation import Draws, augment, random_affine, random_flips, random_shift


def draws(seed: int = 0) -> Draws:
    return Draws(torch.Generator().manual_seed(seed))


def blob(count: int, height: int, width: int) -> torch.Tensor:
    """Black images with a round bright spot in the center."""
    rows = torch.arange(height).reshape(-1, 1) - (height - 1) / 2
    columns = torch.arange(width).reshape(1, -1) - (width - 1) / 2
    return (255 * torch.exp(-(rows**2 + columns**2) / 18)).expand(count, 1, height, width)


def moments(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Center (row, column), variances (row, column) and covariance of each image's brightness."""
    weights = images[:, 0] / images[:, 0].sum(dim=(1, 2), keepdim=True)
    rows, columns = torch.arange(images.shape[2]).reshape(-1, 1), torch.arange(images.shape[3]).reshape(1, -1)
    row, column = (weights * rows).sum((1, 2)), (weights * columns).sum((1, 2))
    from_row, from_column = rows - row[:, None, None], columns - column[:, None, None]
    return (
        row,
        column,
        (weights * from_row**2).sum((1, 2)),
        (weights * from_column**2).sum((1, 2)),
        (weights * from_row * from_column).sum((1, 2)),
    )


@pytest.mark.parametrize("elastic", [False, True])
def test_the_same_seed_gives_the_same_images(elastic: bool) -> None:
    images = torch.randint(0, 256, (8, 3, 12, 10), dtype=torch.uint8)
    first, again, second = (random_affine(images, draws(seed), elastic) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0] - images[0], first[1] - images[1])


@pytest.mark.parametrize("kind", ["shift", "affine", "elastic"])
def test_parts_of_a_batch_are_augmented_as_in_the_whole_batch(kind: str) -> None:
    images = torch.randint(0, 256, (8, 3, 12, 10), dtype=torch.uint8)

    def augment_part(part: torch.Tensor, of_batch: Draws) -> torch.Tensor:
        return random_flips(augment(part, kind, of_batch), ["horizontal"], of_batch)

    parts = [augment_part(images[first : first + 4], draws()._replace(batch_size=8, first=first)) for first in (0, 4)]
    torch.testing.assert_close(torch.cat(parts), augment_part(images, draws()))


@pytest.mark.parametrize("elastic", [False, True])
def test_shape_and_range_are_preserved_and_constant_images_stay_constant(elastic: bool) -> None:
    images = torch.randint(0, 256, (16, 3, 9, 14), dtype=torch.uint8)
    images[0] = 255
    out = random_affine(images, draws(), elastic)
    assert out.shape == images.shape
    assert out.min() >= 0
    assert out.max() <= 255.001
    torch.testing.assert_close(out[0], torch.full((3, 9, 14), 255.0))


def test_shifts_cover_their_whole_range() -> None:
    row, column, *_ = moments(random_affine(blob(500, 40, 60), draws()))
    row, column = row - 19.5, column - 29.5
    for offset, side in ((row, 40), (column, 60)):
        assert offset.abs().max() <= augmentation.SHIFT * side * 1.35
        assert offset.min() < -0.6 * augmentation.SHIFT * side
        assert offset.max() > 0.6 * augmentation.SHIFT * side
    assert abs(torch.corrcoef(torch.stack([row, column]))[0, 1]) < 0.2


def test_rotation_keeps_a_round_spot_round_in_an_oblong_image(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SCALE", "SHEAR", "SHIFT"):
        monkeypatch.setattr(augmentation, name, 0.0)
    monkeypatch.setattr(augmentation, "DEGREES", 40.0)
    _, _, row_variance, column_variance, covariance = moments(random_affine(blob(50, 31, 93), draws()))
    torch.testing.assert_close(row_variance, column_variance, rtol=0.05, atol=0)
    assert covariance.abs().max() < 0.05 * row_variance.mean()


def test_an_elastic_deformation_moves_distant_parts_independently(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SCALE", "SHEAR", "SHIFT", "DEGREES"):
        monkeypatch.setattr(augmentation, name, 0.0)
    # As far apart as the control points (at 0, 1/3, 2/3 and 1 of the side), two spots move
    # independently.
    left = torch.cat([blob(400, 61, 41), torch.zeros(400, 1, 61, 80)], dim=3)
    right = left.flip(3)
    moved = [moments(random_affine(spot, draws(), elastic=True))[:2] for spot in (left, right)]
    shifts = [(row - 30, column - middle) for (row, column), middle in zip(moved, (20, 100), strict=True)]
    for rows, columns in shifts:
        for offset, side in ((rows, 61), (columns, 121)):
            assert 0.25 * augmentation.MAX_DISPLACEMENT * side < offset.std() < augmentation.MAX_DISPLACEMENT * side
            assert offset.abs().max() < 1.3 * augmentation.MAX_DISPLACEMENT * side
    for first, second in zip(*shifts, strict=True):
        assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.3


def test_each_image_is_mirrored_with_a_probability_of_one_half() -> None:
    images = torch.arange(6, dtype=torch.uint8).reshape(1, 1, 2, 3).repeat(400, 1, 1, 1)
    flipped = random_flips(images, ["horizontal", "vertical"], draws())
    counts = {tuple(image.flatten().tolist()): 0 for image in (images[0], images[0].flip(2), images[0].flip(1))}
    counts[tuple(images[0].flip(1, 2).flatten().tolist())] = 0
    for image in flipped:
        counts[tuple(image.flatten().tolist())] += 1
    assert all(70 < count < 130 for count in counts.values())


def test_images_are_shifted_by_whole_pixels_and_filled_with_their_reflection() -> None:
    image = torch.arange(16 * 32, dtype=torch.float32).reshape(1, 1, 16, 32)
    shifted = random_shift(image.repeat(300, 1, 1, 1), draws())
    padded = torch.nn.functional.pad(image, (2, 2, 1, 1), mode="reflect")
    crops = {(y, x): padded[0, 0, y : y + 16, x : x + 32].flatten().tolist() for y in range(3) for x in range(5)}
    offsets = {offset for image in shifted for offset, crop in crops.items() if image.flatten().tolist() == crop}
    assert offsets == set(crops)
    assert shifted.shape == (300, 1, 16, 32)
