"""Proportions and areas under the ROC curve, each with its interval."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from scipy.optimize import root_scalar
from scipy.stats import binomtest, norm, rankdata

ROC_POINTS = 200


class Share(BaseModel):
    """``count`` of ``total`` with the interval of Wilson (1927), which holds near 0 and 1 and for few."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int = Field(ge=0)
    total: int = Field(ge=1)
    low: float = Field(ge=0, le=1, allow_inf_nan=False)
    high: float = Field(ge=0, le=1, allow_inf_nan=False)

    @property
    def value(self) -> float:
        """The share itself, 0 to 1."""
        return self.count / self.total

    def __str__(self) -> str:
        return f"{self.value:.2%} ({self.low:.2%} to {self.high:.2%})"


class Auroc(BaseModel):
    """Area under the ROC curve: how often an unknown image lies further away than a known one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float = Field(ge=0, le=1, allow_inf_nan=False)
    low: float = Field(ge=0, le=1, allow_inf_nan=False)
    high: float = Field(ge=0, le=1, allow_inf_nan=False)
    known: int
    unknown: int

    def __str__(self) -> str:
        return f"{self.value:.4f} ({self.low:.4f} to {self.high:.4f})"


class Roc(BaseModel):
    """Accepting what is nearer than each of ``thresholds``: at most `ROC_POINTS` points, all finite."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    false_accepts: tuple[float, ...]
    """Share of unknown images within the threshold (the curve's x, FAR)."""
    true_accepts: tuple[float, ...]
    """Share of known images within it (the curve's y, 1 - FRR)."""
    thresholds: tuple[float, ...]


def share(count: int, total: int, confidence: float) -> Share:
    """``count`` of ``total`` (at least 1) with its two-sided interval."""
    interval = binomtest(count, total).proportion_ci(confidence, method="wilson")
    # Rounding can leave 1 - 1e-17 at the ends.
    return Share(
        count=count,
        total=total,
        low=min(float(interval.low), count / total),
        high=max(float(interval.high), count / total),
    )


def auroc(known: NDArray[np.float32], unknown: NDArray[np.float32], confidence: float) -> Auroc:
    """Area under the ROC curve of distances of known (N,) and unknown (M,) images, neither empty; ties count
    half.

    The interval holds the areas from which the one seen is no further than ``z`` standard errors, the error
    taken at that area from Hanley and McNeil (1982, Radiology 143:29). Solving for the area, as Wilson does
    for shares and Newcombe (2006, Statist. Med. 25:559, method 5) for this statistic, keeps the interval
    honest where all unknown images lie beyond all known ones and an error taken at the area seen would be
    zero.
    """
    ranks = rankdata(np.concatenate([known, unknown]))
    m, n = len(unknown), len(known)
    value = (float(ranks[n:].sum()) - m * (m + 1) / 2) / (m * n)
    z = float(norm.ppf((1 + confidence) / 2))

    def beyond(area: float) -> float:
        return abs(value - area) - z * math.sqrt(_hanley_mcneil(area, m, n))

    return Auroc(value=value, low=_end(beyond, value, 0.0), high=_end(beyond, value, 1.0), known=n, unknown=m)


def roc(known: NDArray[np.float32], unknown: NDArray[np.float32]) -> Roc:
    """The curve at thresholds evenly spread over the ranks of all distances, from accepting none to accepting
    all.
    """
    distances = np.unique(np.concatenate([known, unknown]))
    picked = np.unique(np.linspace(0, len(distances) - 1, ROC_POINTS - 1).round().astype(int))
    thresholds = np.concatenate([[0.0], distances[picked]])
    inside = [np.searchsorted(np.sort(group), thresholds, side="right") for group in (known, unknown)]
    # The first point is "accept none", even where a distance is 0.
    inside[0][0] = inside[1][0] = 0
    return Roc(
        true_accepts=tuple((inside[0] / len(known)).tolist()),
        false_accepts=tuple((inside[1] / len(unknown)).tolist()),
        thresholds=tuple(thresholds.tolist()),
    )


def _hanley_mcneil(area: float, unknown: int, known: int) -> float:
    """Variance of the area under the curve; 0 at areas 0 and 1."""
    both_unknown, both_known = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area)
    variance += (unknown - 1) * (both_unknown - area**2) + (known - 1) * (both_known - area**2)
    return max(variance, 0.0) / (unknown * known)


def _end(beyond: Callable[[float], float], value: float, limit: float) -> float:
    """Where between ``value`` and ``limit`` the function turns positive; ``limit``, if nowhere."""
    if value == limit or beyond(limit) <= 0:
        return limit
    # At the area seen itself the function is negative, except at 0 and 1, where it is 0 on both sides.
    start = value + (limit - value) * 1e-9
    return (
        float(root_scalar(beyond, bracket=(start, limit), method="brentq").root)
        if beyond(start) < 0
        else value
    )
