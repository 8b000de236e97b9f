"""The ArcFace head against the paper's formula in double precision."""

import math

import numpy as np
import pytest
import torch

from evernear.embedding.arcface import (
    HIGHEST_PROBABILITY,
    HIGHEST_SMOOTHED_PROBABILITY,
    MIN_CLASSES_TO_SAMPLE,
    SAMPLE_RATE,
    ArcFace,
    choose_scale,
    sample_classes,
)


def head(classes: int = 5, dim: int = 7, scale: float = 32.0) -> ArcFace:
    torch.manual_seed(0)
    return ArcFace(classes, dim, scale).double()


def by_angles(embeddings: np.ndarray, centers: np.ndarray, labels: np.ndarray, s: float, m: float) -> np.ndarray:
    """Equation 3 of arXiv:1801.07698 implemented literally: arccosine, add m, cosine."""
    logits = np.empty((len(embeddings), len(centers)))
    for i, x in enumerate(embeddings):
        for j, w in enumerate(centers):
            theta = math.acos(float(np.dot(x, w) / np.linalg.norm(x) / np.linalg.norm(w)))
            if j != labels[i]:
                logits[i, j] = s * math.cos(theta)
            elif theta + m <= math.pi:
                logits[i, j] = s * math.cos(theta + m)
            else:
                logits[i, j] = s * (math.cos(theta) - m * math.sin(m))
    return logits


@pytest.mark.parametrize("margin", [0.0, 0.3, 0.5, 1.2])
def test_logits_follow_the_paper(margin: float) -> None:
    arcface = head()
    embeddings = torch.randn(200, 7, dtype=torch.float64)
    embeddings[:50] *= -1e3  # angles beyond pi - m, and lengths that must not matter
    embeddings[50:60] = -arcface.centers[2].detach() + 0.1 * torch.randn(10, 7)
    labels = torch.randint(0, 5, (200,))
    labels[50:60] = 2
    expected = by_angles(embeddings.numpy(), arcface.centers.detach().numpy(), labels.numpy(), 32.0, margin)
    np.testing.assert_allclose(arcface(embeddings, labels, margin).detach().numpy(), expected, atol=1e-6)


def test_no_margin_without_labels() -> None:
    arcface, embeddings = head(), torch.randn(20, 7, dtype=torch.float64)
    expected = by_angles(embeddings.numpy(), arcface.centers.detach().numpy(), np.full(20, -1), 32.0, 0.5)
    np.testing.assert_allclose(arcface(embeddings, margin=0.5).detach().numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("classes", [2, 10, 1000])
@pytest.mark.parametrize(
    ("label_smoothing", "highest"), [(0.0, HIGHEST_PROBABILITY), (0.1, HIGHEST_SMOOTHED_PROBABILITY)]
)
def test_scale_lets_the_softmax_reach_its_highest_probability(classes, label_smoothing, highest) -> None:
    simplex = torch.eye(classes, dtype=torch.float64) - 1 / classes  # the class centers farthest from each other
    cosine = torch.nn.functional.normalize(simplex) @ torch.nn.functional.normalize(simplex).T
    probability = (choose_scale(classes, label_smoothing) * cosine).softmax(dim=1).diagonal()
    torch.testing.assert_close(1 - probability, torch.full_like(probability, 1 - highest), rtol=1e-6, atol=0)


def test_sampled_logits_are_those_of_the_sampled_classes() -> None:
    arcface, embeddings = head(), torch.randn(3, 7, dtype=torch.float64)
    sampled = torch.tensor([4, 0, 2])
    expected = arcface(embeddings, torch.tensor([4, 2, 4]), 0.5)[:, sampled]
    torch.testing.assert_close(arcface(embeddings, torch.tensor([0, 2, 0]), 0.5, sampled), expected)


def test_sample_contains_the_classes_of_the_batch_once() -> None:
    labels = torch.tensor([7, 9_999, 7, 0])
    sampled, positions = sample_classes(labels, MIN_CLASSES_TO_SAMPLE, labels)
    assert torch.equal(sampled[positions], labels)
    assert len(sampled.unique()) == len(sampled)
    assert MIN_CLASSES_TO_SAMPLE * SAMPLE_RATE <= len(sampled) <= MIN_CLASSES_TO_SAMPLE * SAMPLE_RATE + 3


def test_processes_sample_the_same_classes() -> None:
    batch_labels = torch.tensor([7, 9_999, 7, 0])
    samples: list[torch.Tensor] = []
    for part in batch_labels.split(2):
        torch.manual_seed(0)
        sampled, positions = sample_classes(part, MIN_CLASSES_TO_SAMPLE, batch_labels)
        assert torch.equal(sampled[positions], part)
        samples.append(sampled)
    assert torch.equal(*samples)


def test_few_classes_are_not_sampled() -> None:
    labels = torch.tensor([7, 3])
    assert sample_classes(labels, MIN_CLASSES_TO_SAMPLE - 1, labels) == (None, labels)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gradient_is_finite_where_embedding_and_center_coincide(sign: float) -> None:
    arcface = ArcFace(3, 4, 32.0)
    embeddings = (sign * arcface.centers.detach().clone()).requires_grad_()
    arcface(embeddings, torch.tensor([0, 1, 2]), 0.5).sum().backward()
    assert embeddings.grad.isfinite().all()
    assert arcface.centers.grad.isfinite().all()


def test_the_target_logit_decreases_over_all_angles() -> None:
    arcface = ArcFace(2, 2, 1.0).double()
    arcface.centers.data = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    angles = torch.linspace(0.01, math.pi - 0.01, 500, dtype=torch.float64)
    embeddings = torch.stack([angles.cos(), angles.sin()], dim=1)
    logits = arcface(embeddings, torch.zeros(500, dtype=torch.long), 0.5)[:, 0]
    assert (logits.diff() < 0).all()
