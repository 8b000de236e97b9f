"""The verdict card: an HTML page with the decision, its reasons and the metrics."""

import io

import numpy as np
from matplotlib.figure import Figure

from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.gate import Rule, Verdict
from evernear.evaluation.open_set import OpenSet
from evernear.evaluation.statistics import Proportion, Roc
from evernear.index.description import describe_threshold
from evernear.output import printable
from evernear.reporting.plots import escape, page, svg

FALSE_REJECT_RATES = (0.01, 0.02, 0.05, 0.10, 0.20)
"""Points of the detection error trade-off that the card lists."""
DET_LIMITS = (0.005, 0.995)
DET_TICKS = (0.01, 0.05, 0.2, 0.5, 0.8, 0.95)
MAX_LABEL_CHARACTERS = 30
"""Longest class name beside the confusion matrix; longer names are shortened."""


def verdict_card(verdict: Verdict, evaluation: Evaluation) -> str:
    """The verdict as an HTML page: reasons, rules, metrics and confusion matrix."""
    title = "Promote" if verdict.promote else "Hold"
    return page(
        f"{title}: candidate against {_champion_name(evaluation)}",
        _list([*verdict.reasons, *evaluation.training_warnings]),
        _rules(verdict.rules),
        _metrics(evaluation),
        _rejection(evaluation),
        svg(_confusion(evaluation)),
    )


def confusion_png(evaluation: Evaluation) -> bytes:
    """The candidate's confusion matrix as PNG, for clients that do not show HTML."""
    buffer = io.BytesIO()
    _confusion(evaluation).savefig(buffer, format="png", dpi=100, metadata={"Software": None})
    return buffer.getvalue()


def _champion_name(evaluation: Evaluation) -> str:
    return f"champion {evaluation.champion.name}" if evaluation.champion else "no champion yet"


def _list(items: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _rules(rules: list[Rule]) -> str:
    rows = (
        f'<tr><td>{escape(rule.name)}</td><td class="{"yes" if rule.passed else "no"}">'
        f"{'passed' if rule.passed else 'failed'}</td>"
        f"<td class=n>{_number(rule.candidate)}</td><td class=n>{_number(rule.champion)}</td>"
        f"<td class=n>{_number(rule.bound)}</td></tr>"
        for rule in rules
    )
    head = "<tr><th>rule</th><th></th><th>candidate</th><th>champion</th><th>bound</th></tr>"
    return f"<h2>Rules</h2><table>{head}{''.join(rows)}</table>"


def _metrics(evaluation: Evaluation) -> str:
    candidate, champion = evaluation.candidate, evaluation.champion
    shares: dict[str, tuple[Proportion | None, Proportion | None]] = {
        "accuracy": (candidate.accuracy, champion.accuracy if champion else None),
        "recall@1": (candidate.recall_at_1, champion.recall_at_1 if champion else None),
        "recall@5": (candidate.recall_at_5, champion.recall_at_5 if champion else None),
        "known images called unknown": (candidate.false_rejects, champion.false_rejects if champion else None),
        "index recall": (candidate.index_recall, champion.index_recall if champion else None),
    }
    rows = "".join(
        f"<tr><td>{name}</td><td>{escape(ours or '-')}</td><td>{escape(theirs or '-')}</td></tr>"
        for name, (ours, theirs) in shares.items()
    )
    head = "<tr><th></th><th>candidate</th><th>champion</th></tr>"
    heading = f"<h2>Metrics on {candidate.accuracy.total:,} test images</h2>"
    return f"{heading}<table>{head}{rows}</table>{_baselines(evaluation)}"


def _baselines(evaluation: Evaluation) -> str:
    rows = "".join(
        f"<tr><td>{escape(each.name)}</td><td>{escape(each.accuracy)}</td><td class=n>{each.accuracy.total:,}</td></tr>"
        for each in evaluation.baselines
    )
    head = "<tr><th>trivial baseline</th><th>accuracy</th><th>test images</th></tr>"
    return f"<table>{head}{rows}</table>" if rows else ""


def _rejection(evaluation: Evaluation) -> str:
    """How the threshold was set, and the trade-off that it was chosen from."""
    probe, threshold = evaluation.open_set, describe_threshold(evaluation.candidate.threshold)
    if probe.auroc is None or probe.roc is None:
        origin = (
            f"The open-set threshold ({threshold}) was reused together with the network."
            if probe.threshold is not None
            else f"Too few classes to hold some out: the threshold ({threshold}) was calibrated on gallery impostors."
        )
        return f"<h2>Unknown images</h2><p>{escape(origin)}</p>"
    held_out = f"Classes held out by the probe: {', '.join(probe.held_out)}. This release: {threshold}."
    rows = "".join(
        f"<tr><td class=n>{rate:.0%}</td><td class=n>{probe.roc.false_accepts_at(rate):.1%}</td></tr>"
        for rate in FALSE_REJECT_RATES
    )
    head = "<tr><th>known images called unknown</th><th>images of held-out classes accepted</th></tr>"
    at_95 = f"Accepted where 95% of known images are (FPR at 95% TPR): {probe.false_accepts_at_95}."
    return (
        f"<h2>Unknown images</h2><p>{escape(probe.summary())}</p><p>{escape(held_out)} {escape(at_95)}</p>"
        f"<table>{head}{rows}</table>{svg(_trade_off(probe, probe.roc))}"
    )


def _trade_off(probe: OpenSet, curve: Roc) -> Figure:
    """The detection error trade-off, on the scales of Martin et al. (1997, Eurospeech)."""
    from scipy.special import ndtri

    figure = Figure(figsize=(4, 4), layout="constrained")
    axes = figure.subplots()
    rejected = 1 - np.array(curve.true_accepts)
    low, high = DET_LIMITS
    axes.plot(*(ndtri(np.clip(rates, low, high)) for rates in (curve.false_accepts, rejected)))
    if probe.false_accepts and probe.false_rejects:
        point = (probe.false_accepts.value, probe.false_rejects.value)
        axes.plot(*(ndtri(np.clip([rate], low, high)) for rate in point), "o", label="operating point")
        axes.legend()
    axes.set(xlabel="held-out classes accepted", ylabel="known images rejected", title="Detection error trade-off")
    for set_ticks in (axes.set_xticks, axes.set_yticks):
        set_ticks(ndtri(np.array(DET_TICKS)), [f"{rate:.0%}" for rate in DET_TICKS])
    axes.grid(alpha=0.3)
    return figure


def _confusion(evaluation: Evaluation) -> Figure:
    labels, rows = evaluation.candidate.confusion_matrix()
    names = [_short(label) for label in labels]
    # In inches: 0.5 per cell and 1/12 per character of the labels, limited to the size of a screen.
    side = min(12.0, max(4.0, 0.5 * len(labels) + 1.5 + max(map(len, names)) / 12))
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    # Only mistakes are colored, so that a single one among thousands of right answers is visible.
    mistakes = [[0 if i == j else count for j, count in enumerate(row)] for i, row in enumerate(rows)]
    highest = max(1, *(max(row) for row in mistakes))
    axes.imshow(mistakes, cmap="Reds", vmin=0, vmax=highest)
    ticks = range(len(labels))
    axes.set(xticks=ticks, yticks=ticks, xlabel="answer", ylabel="label", title="Confusion matrix")
    axes.set_xticklabels(names, rotation=90 if max(map(len, names)) > 2 else 0)
    axes.set_yticklabels(names)
    if len(labels) <= 25:
        for i, row in enumerate(rows):
            for j, count in enumerate(row):
                if count:
                    color = "white" if mistakes[i][j] > 0.6 * highest else "black"
                    axes.text(j, i, str(count), ha="center", va="center", fontsize=8, color=color)
    return figure


def _short(label: str) -> str:
    """``label`` with its middle replaced by an ellipsis if it is too long."""
    label = printable(label)
    return (
        label
        if len(label) <= MAX_LABEL_CHARACTERS
        else f"{label[: MAX_LABEL_CHARACTERS // 2]}…{label[-MAX_LABEL_CHARACTERS // 2 + 1 :]}"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
