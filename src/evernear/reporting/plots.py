"""Curves as self-contained HTML: one inline SVG, no script, nothing fetched."""

import html
import io
from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

# Text stays text: smaller, searchable, and read out by a screen reader. A fixed salt makes the SVG byte-stable.
mpl.rcParams["svg.fonttype"] = "none"
mpl.rcParams["svg.hashsalt"] = "evernear"


def training_curves(history: Sequence[Mapping[str, float]]) -> str:
    """Loss and accuracy over epochs as an HTML page; ``history`` holds one mapping of numbers per epoch."""
    epochs = [row["epoch"] for row in history]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    for axes, quantity in ((loss, "loss"), (accuracy, "accuracy")):
        for name in sorted({key for row in history for key in row if key.endswith(quantity)}):
            axes.plot(epochs, [row.get(name, float("nan")) for row in history], marker="o", label=_spoken(name))
        axes.set(xlabel="epoch", ylabel=quantity)
        axes.grid(alpha=0.3)
        axes.legend()
    return page("Training curves", svg(figure))


def svg(figure: Figure) -> str:
    """``figure`` as an inline ``<svg>`` element."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def page(title: str, *parts: str) -> str:
    """A self-contained HTML page of ``parts``; ``title`` is escaped, the parts are HTML already."""
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;margin:1.5rem;max-width:60rem;color:#1d2330}"
        "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.3rem .8rem;border-bottom:1px solid #d8dce5;"
        "text-align:left}td.n{text-align:right;font-variant-numeric:tabular-nums}"
        ".yes{color:#116b3a}.no{color:#a11223}svg{max-width:100%;height:auto}"
    )
    name = html.escape(title)
    head = f'<meta charset="utf-8"><title>{name}</title><style>{style}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{name}</h1>{"".join(parts)}</body></html>'


def _spoken(name: str) -> str:
    return name.replace("_", " ")
