"""Self-contained HTML pages with inline SVG plots, without scripts or external resources."""

import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

from evernear.output import printable

if TYPE_CHECKING:  # readers of a verdict load no torch
    from evernear.embedding.artifact import Epoch

# Text instead of paths is smaller, searchable and accessible. A fixed salt makes the SVG reproducible.
mpl.rcParams["svg.fonttype"] = "none"
mpl.rcParams["svg.hashsalt"] = "evernear"
# A $ in a class name must not start a formula.
mpl.rcParams["text.parse_math"] = False


def training_curves(history: Sequence["Epoch"]) -> str:
    """Loss, accuracy and learning rate by epoch, as an HTML page."""
    epochs = [point.epoch for point in history]
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    loss, accuracy, rate = figure.subplots(1, 3)
    loss.plot(epochs, [point.train_loss for point in history], marker="o", label="train, with margin")
    loss.plot(epochs, [point.gallery_loss for point in history], marker="o", label="gallery, held out")
    loss.legend()
    accuracy.plot(epochs, [point.gallery_accuracy for point in history], marker="o")
    rate.plot(epochs, [point.learning_rate for point in history], marker="o")
    for axes, quantity in ((loss, "loss"), (accuracy, "gallery accuracy"), (rate, "learning rate")):
        axes.set(xlabel="epoch", ylabel=quantity)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    return page("Training curves", svg(figure))


def svg(figure: Figure) -> str:
    """``figure`` as an inline ``<svg>`` element."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def escape(text: object) -> str:
    """``text`` escaped for HTML, on one line and without control characters."""
    return html.escape(printable(str(text)))


def page(title: str, *parts: str) -> str:
    """A self-contained HTML page. ``title`` is text, which is escaped; ``parts`` are HTML."""
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;margin:1.5rem;max-width:60rem;color:#1d2330}"
        "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.3rem .8rem;border-bottom:1px solid #d8dce5;"
        "text-align:left}td.n{text-align:right;font-variant-numeric:tabular-nums}"
        ".yes{color:#116b3a}.no{color:#a11223}svg{max-width:100%;height:auto}"
    )
    name = escape(title)
    head = f'<meta charset="utf-8"><title>{name}</title><style>{style}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{name}</h1>{"".join(parts)}</body></html>'
