"""Charts as PNG, and as inline SVG that follows the page's light or dark theme."""

import io
import re
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Literal

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from evernear.common.output import printable
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.examples import BINS, LiveDistances
from evernear.evaluation.headline import headline
from evernear.evaluation.open_set import OpenSet
from evernear.evaluation.statistics import Roc
from evernear.index.description import MAX_DISTANCE

# Text is smaller than paths, searchable and accessible. A fixed salt makes the SVG reproducible.
mpl.rcParams["svg.fonttype"] = "none"
mpl.rcParams["svg.hashsalt"] = "evernear"
# A `$` in a class name must not start a formula.
mpl.rcParams["text.parse_math"] = False

INK, GRID, FIRST, SECOND, LIMIT = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05"
"""Placeholders for the page's colors."""
CSS_VARIABLES = {INK: "--ink", GRID: "--line", FIRST: "--first", SECOND: "--second", LIMIT: "--limit"}
SIZE_IN = (4.4, 2.7)
LEGEND_ROOM = 1.5
"""Height of a histogram with its legend, relative to the height without it."""
DET_LIMITS = (0.005, 0.995)
DET_TICKS = (0.01, 0.05, 0.2, 0.5, 0.8, 0.95)
MAX_LABEL_CHARACTERS = 30
"""Maximum length of a class name next to the confusion matrix. Longer names are shortened."""


def training_curves(history: Sequence[Mapping[str, float]]) -> Markup:
    """Loss, gallery accuracy and learning rate by epoch. ``history`` contains
    `evernear.embedding.artifact.Epoch` objects as JSON."""
    epochs = [point["epoch"] for point in history]
    charts: list[Markup] = []
    quantities = {
        "loss": {"train_loss": "train, with margin", "gallery_loss": "gallery, held out"},
        "gallery accuracy": {"gallery_accuracy": ""},
        "learning rate": {"learning_rate": ""},
    }
    for quantity, series in quantities.items():
        figure, axes = _chart("epoch", quantity)
        for color, (name, label) in zip((FIRST, SECOND), series.items(), strict=False):
            axes.plot(epochs, [point[name] for point in history], ".-", color=color, label=label)
        if len(series) > 1:
            _legend(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        charts.append(svg(figure, f"{quantity} by epoch"))
    return Markup('<div class="charts">{}</div>').format(Markup("").join(charts))


def distances(correct: Sequence[int], incorrect: Sequence[int], threshold: float) -> Markup:
    series = {"label right": correct, "label wrong": incorrect}
    return _histogram("Test images: distance to the nearest gallery image", series, threshold)


def probe_distances(probe: OpenSet, curve: Roc) -> Markup:
    """Histograms of the open-set probe's distances, from its ROC curve, with its threshold if
    any."""
    edges = np.linspace(0, MAX_DISTANCE, BINS + 1)
    thresholds, known, unknown = (
        np.array(column) for column in (curve.thresholds, curve.true_accepts, curve.false_accepts)
    )
    threshold = MAX_DISTANCE
    if probe.separates and probe.false_rejects:
        threshold = float(thresholds[np.abs(1 - known - probe.false_rejects.value).argmin()])
    series = {
        name: np.diff(np.interp(edges, thresholds, cumulative, 0, 1)).tolist()
        for name, cumulative in (("known classes", known), ("held-out classes", unknown))
    }
    return _histogram("Open-set probe: known and unseen classes", series, threshold)


def plot_live_distances(live: LiveDistances) -> Markup:
    return _histogram("Live queries of the champion", {"live queries": live.histogram}, live.threshold)


def trade_off(probe: OpenSet, curve: Roc) -> Markup:
    """The detection error trade-off, on the scales of Martin et al. (1997, Eurospeech)."""
    ndtri = np.vectorize(NormalDist().inv_cdf, otypes=[float])
    figure, axes = _chart("held-out classes accepted", "known images rejected")
    rejected = 1 - np.array(curve.true_accepts)
    low, high = DET_LIMITS
    axes.plot(*(ndtri(np.clip(rates, low, high)) for rates in (curve.false_accepts, rejected)), color=FIRST)
    if probe.false_accepts and probe.false_rejects:
        point = (probe.false_accepts.value, probe.false_rejects.value)
        coordinates = (ndtri(np.clip([rate], low, high)) for rate in point)
        axes.plot(*coordinates, "o", color=LIMIT, label="operating point")
        _legend(axes)
    for set_ticks in (axes.set_xticks, axes.set_yticks):
        set_ticks(ndtri(np.array(DET_TICKS)), [f"{rate:.0%}" for rate in DET_TICKS])
    axes.set_title("Detection error trade-off", color=INK, fontsize=10, loc="left")
    return svg(figure, "detection error trade-off")


def _histogram(title: str, series: Mapping[str, Sequence[float]], threshold: float) -> Markup:
    figure, axes = _chart("distance", "share of images")
    edges = np.linspace(0, MAX_DISTANCE, BINS + 1)
    for color, (name, counts) in zip((FIRST, SECOND), series.items(), strict=False):
        total = sum(counts)
        if total:
            shares = np.array(counts) / total
            axes.stairs(shares, edges, fill=True, alpha=0.35, color=color, label=name)
            axes.stairs(shares, edges, color=color)
    if threshold < MAX_DISTANCE:
        axes.axvline(
            threshold, ymax=1 / LEGEND_ROOM, color=LIMIT, linestyle="--", label=f"unknown beyond {threshold:.2f}"
        )
    axes.set_xlim(0, max(1.0, _largest(series) + 0.1))
    axes.set_ylim(0, LEGEND_ROOM * axes.get_ylim()[1])
    axes.set_title(title, color=INK, fontsize=10, loc="left")
    _legend(axes, loc="upper right")
    return svg(figure, title)


def _largest(series: Mapping[str, Sequence[float]]) -> float:
    """The upper edge of the last bin in which any series has a value."""
    used = [index for counts in series.values() for index, count in enumerate(counts) if count]
    return (max(used, default=0) + 1) * MAX_DISTANCE / BINS


def _chart(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE_IN, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_color(GRID)
    return figure, axes


def _legend(axes: Axes, loc: Literal["best", "upper right"] = "best") -> None:
    axes.legend(loc=loc, labelcolor=INK, facecolor="none", edgecolor="none", fontsize=9)


def svg(figure: Figure, description: str) -> Markup:
    """Convert ``figure`` to an inline ``<svg>`` element in the page's colors, without a fixed
    size."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.S)
    # group IDs would not be unique on a page; clip paths and markers retain theirs
    text = re.sub(r' id="[a-z0-9]+[_-][^"]*"', "", text)
    text = re.sub(r"font: ([0-9.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r' width="[0-9.]+pt" height="[0-9.]+pt"| height="[0-9.]+pt"| width="[0-9.]+pt"', "", text, count=2)
    for placeholder, variable in CSS_VARIABLES.items():
        text = text.replace(placeholder, f"var({variable})")
    attributes = Markup('<svg role="img" aria-label="{}"').format(printable(description))
    return attributes + Markup(text.removeprefix("<svg"))  # noqa: S704 - matplotlib escapes text


def confusion_png(evaluation: Evaluation) -> bytes:
    """The candidate's confusion matrix, for clients that do not show HTML."""
    columns, rows = evaluation.candidate.confusion_matrix()
    names = [shorten(column) for column in columns]
    # inches: 0.5 per cell plus 1/12 per character of the labels, at most a screen
    side = min(12.0, max(4.0, 0.5 * len(columns) + 1.5 + max(map(len, names)) / 12))
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    # only images that are not named right are colored: a single one among thousands is visible
    mistakes = [[0 if i == j else count for j, count in enumerate(row)] for i, row in enumerate(rows)]
    highest = max(1, *(max(row) for row in mistakes))
    axes.imshow(mistakes, cmap="Reds", vmin=0, vmax=highest)
    axes.set(xticks=range(len(columns)), yticks=range(len(rows)), xlabel="answer", ylabel="label")
    axes.set_title(headline(evaluation.metrics()).capitalize(), fontsize=9, wrap=True)
    axes.set_xticklabels(names, rotation=90)
    axes.set_yticklabels(names[:-1])
    if len(rows) <= 25:
        for i, row in enumerate(rows):
            for j, count in enumerate(row):
                if count:
                    color = "white" if mistakes[i][j] > 0.6 * highest else "black"
                    axes.text(j, i, str(count), ha="center", va="center", fontsize=8, color=color)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100, metadata={"Software": None})
    return buffer.getvalue()


def shorten(label: str) -> str:
    """Replace the middle of a too long ``label`` with an ellipsis."""
    label = printable(label)
    return (
        label
        if len(label) <= MAX_LABEL_CHARACTERS
        else f"{label[: MAX_LABEL_CHARACTERS // 2]}…{label[-MAX_LABEL_CHARACTERS // 2 + 1 :]}"
    )
