"""The verdict's card: what was decided and why, on one small page."""

import io

from matplotlib.figure import Figure

from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.gate import Rule, Verdict
from evernear.evaluation.open_set import OpenSet
from evernear.evaluation.statistics import Proportion
from evernear.output import printable
from evernear.reporting.plots import escape, page, svg

LONGEST_NAME = 30
"""Letters of a class's name beside the confusion matrix."""


def verdict_card(verdict: Verdict, evaluation: Evaluation) -> str:
    """The verdict with its reasons on top, then rules, figures and the confusion matrix, as an HTML page."""
    title = "Promote" if verdict.promote else "Hold"
    return page(
        f"{title}: candidate against {_champion_name(evaluation)}",
        _list(verdict.reasons),
        _rules(verdict.rules),
        _figures(evaluation),
        svg(_confusion(evaluation)),
    )


def confusion_png(evaluation: Evaluation) -> bytes:
    """The candidate's confusion matrix as a picture, for where no HTML is shown."""
    buffer = io.BytesIO()
    _confusion(evaluation).savefig(buffer, format="png", dpi=100, metadata={"Software": None})
    return buffer.getvalue()


def _champion_name(evaluation: Evaluation) -> str:
    return f"champion {evaluation.champion.name}" if evaluation.champion else "no champion yet"


def _list(sentences: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _rules(rules: list[Rule]) -> str:
    rows = (
        f'<tr><td>{escape(rule.name)}</td><td class="{"yes" if rule.passed else "no"}">'
        f"{'kept' if rule.passed else 'broken'}</td>"
        f"<td class=n>{_number(rule.candidate)}</td><td class=n>{_number(rule.champion)}</td>"
        f"<td class=n>{_number(rule.bound)}</td></tr>"
        for rule in rules
    )
    head = "<tr><th>rule</th><th></th><th>candidate</th><th>champion</th><th>bound</th></tr>"
    return f"<h2>Rules</h2><table>{head}{''.join(rows)}</table>"


def _figures(evaluation: Evaluation) -> str:
    candidate, champion = evaluation.candidate, evaluation.champion
    shares: dict[str, tuple[Proportion, Proportion | None]] = {
        "accuracy": (candidate.accuracy, champion.accuracy if champion else None),
        "recall@1": (candidate.recall_at_1, champion.recall_at_1 if champion else None),
        "recall@5": (candidate.recall_at_5, champion.recall_at_5 if champion else None),
        "called unknown": (candidate.false_rejects, champion.false_rejects if champion else None),
        "index recall": (candidate.index_recall, champion.index_recall if champion else None),
    }
    rows = "".join(
        f"<tr><td>{name}</td><td>{escape(ours)}</td><td>{escape(theirs or '-')}</td></tr>"
        for name, (ours, theirs) in shares.items()
    )
    head = "<tr><th></th><th>candidate</th><th>champion</th></tr>"
    unseen = f"<p>{escape(_unseen(evaluation.open_set, candidate.threshold))}</p>"
    return f"<h2>Figures on {candidate.accuracy.total:,} test images</h2><table>{head}{rows}</table>{unseen}"


def _unseen(probe: OpenSet, threshold: float) -> str:
    if probe.auroc:
        held_out = ", ".join(probe.held_out)
        return f"Classes never trained on ({held_out}): AUROC {probe.auroc}, accepted {probe.false_accepts}."
    if probe.threshold is not None:
        return f"The threshold of {threshold:.3f}, beyond which an image is unknown, was taken over with the network."
    return f"Too few classes to leave some out of a training: impostors gave the threshold of {threshold:.3f}."


def _confusion(evaluation: Evaluation) -> Figure:
    labels, rows = evaluation.candidate.confusion_matrix()
    names = [_short(label) for label in labels]
    # Inches: half of one for a cell, a twelfth for a letter, as far as that fits on a screen.
    side = min(12.0, max(4.0, 0.5 * len(labels) + 1.5 + max(map(len, names)) / 12))
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    # Mistakes are what one looks for: right answers are left white, so that one mistake in thousands shows.
    mistakes = [[0 if i == j else count for j, count in enumerate(row)] for i, row in enumerate(rows)]
    most = max(1, *(max(row) for row in mistakes))
    axes.imshow(mistakes, cmap="Reds", vmin=0, vmax=most)
    places = range(len(labels))
    axes.set(xticks=places, yticks=places, xlabel="answer", ylabel="label", title="Confusion matrix")
    axes.set_xticklabels(names, rotation=90 if max(map(len, names)) > 2 else 0)
    axes.set_yticklabels(names)
    if len(labels) <= 25:
        for i, row in enumerate(rows):
            for j, count in enumerate(row):
                if count:
                    colour = "white" if mistakes[i][j] > 0.6 * most else "black"
                    axes.text(j, i, str(count), ha="center", va="center", fontsize=8, color=colour)
    return figure


def _short(label: str) -> str:
    """``label`` with its middle left out, if beside the matrix there is no room for all of it."""
    label = printable(label)
    return label if len(label) <= LONGEST_NAME else f"{label[: LONGEST_NAME // 2]}…{label[-LONGEST_NAME // 2 + 1 :]}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
