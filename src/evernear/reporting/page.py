"""The run page, a self-contained HTML file with everything that a run recorded.

It depends only on the run's record in the store (`evernear.common.run_record`), so it can also be
rendered later and on a different machine. The templates escape every value. The page has neither
scripts nor external resources.
"""

from functools import cache
from typing import Any, cast

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from evernear.common.output import printable, quantity
from evernear.common.progress import duration
from evernear.common.run_record import RunRecord
from evernear.evaluation.examples import SHEET_COLUMNS, Examples, Sheet
from evernear.evaluation.verdict import classes_tested
from evernear.index.description import describe_threshold
from evernear.reporting import plots
from evernear.reporting.glossary import GLOSSARY, anchor_of, explain, term
from evernear.reporting.run_report import ClassRow, Figure, RunReport

FALSE_REJECT_RATES = (0.01, 0.02, 0.05, 0.10, 0.20)
"""False-reject rates for which the page lists the false-accept rate of the probe."""
CLASSES_MAX = 50
REASONS_MAX = 4
"""With this number of reasons, the suggested command is visible without scrolling in the Kubeflow
Pipelines UI, whose frame is about 430 x 600 px."""


def run_page(record: RunRecord) -> str:
    """The page of a run that has ended. Raises the errors of `RunReport.load`."""
    report = RunReport.load(record)
    return _render("run.html.j2", report=report, charts=_charts(report), colors=_colors(report.examples))


def compare_page(first: RunRecord, second: RunRecord) -> str:
    """A page that compares two ended runs. Raises the errors of `RunReport.load`."""
    runs = RunReport.load(first), RunReport.load(second)
    keys = sorted({*runs[0].settings, *runs[1].settings})
    settings = [(key, [report.settings.get(key) for report in runs]) for key in keys]
    measured = [{figure.name: figure.candidate for figure in report.figures} for report in runs]
    tables = [{row.label: row for row in report.classes()} for report in runs]
    classes = [(label, [table.get(label) for table in tables]) for label in sorted({*tables[0], *tables[1]})]
    classes.sort(key=lambda entry: -abs(_named_right(entry[1][0]) - _named_right(entry[1][1])))
    return _render(
        "compare.html.j2",
        runs=runs,
        figures=[Figure(name, *(figures.get(name) for figures in measured)) for name in {**measured[0], **measured[1]}],
        settings=[(key, values) for key, values in settings if values[0] != values[1]],
        classes=classes[:CLASSES_MAX],
        curves=[plots.training_curves(report.training.get("epochs", ())) for report in runs],
    )


def page(title: str, *parts: Markup) -> str:
    """A self-contained page with the HTML elements ``parts``. ``title`` is escaped."""
    return _render("plain.html.j2", title=title, parts=parts)


def _charts(report: RunReport) -> dict[str, Markup]:
    charts: dict[str, Markup] = {}
    if epochs := report.training.get("epochs"):
        charts["training"] = plots.training_curves(epochs)
    if report.evaluation is None or report.examples is None:
        return charts
    examples, probe = report.examples, report.evaluation.open_set
    threshold = report.evaluation.candidate.threshold
    drawn = [plots.distances(examples.distances_right, examples.distances_wrong, threshold)]
    if probe.roc:
        drawn.append(plots.probe_distances(probe, probe.roc))
        drawn.append(plots.trade_off(probe, probe.roc))
    if examples.live:
        drawn.append(plots.plot_live_distances(examples.live))
    charts["distances"] = Markup("").join(drawn)
    return charts


def _colors(examples: Examples | None) -> dict[str, str]:
    labels = sorted({point.label for point in examples.map}) if examples else []
    # lightness alternates, because the hues of many neighboring classes are hard to distinguish
    return {
        label: f"hsl({360 * index / len(labels):.0f} 70% calc(var(--lightness) + {(0, 12)[index % 2]}%))"
        for index, label in enumerate(labels)
    }


def _named_right(row: ClassRow | None) -> float:
    return row.named_right.value if row and row.named_right else 0.0


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("evernear.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters, values = (cast(dict[str, Any], each) for each in (environment.filters, environment.globals))
    filters.update(
        explain=explain,
        tested=classes_tested,
        percent=_percent,
        number=_number,
        short=plots.shorten,
        tile=_tile,
        seconds=duration,
        money=_money,
    )
    values.update(
        anchor_of=anchor_of,
        columns=SHEET_COLUMNS,
        glossary=GLOSSARY,
        quantity=quantity,
        term=term,
        describe_threshold=describe_threshold,
        false_reject_rates=FALSE_REJECT_RATES,
        classes_max=CLASSES_MAX,
        reasons_max=REASONS_MAX,
    )
    return environment


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


def _finalize(value: object) -> object:
    """Convert ``value`` to text on one line without control characters. Jinja escapes it
    afterwards."""
    return value if isinstance(value, Markup) else printable(str(value))


def _percent(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _money(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4f}" if value >= 0.0001 else "< 0.0001"


def _tile(sheet: Sheet, number: int) -> str:
    """The CSS background position of a tile in the sheet, in percent of the sheet's size minus the
    tile's."""
    row, column = divmod(number, SHEET_COLUMNS)
    rows = -(-sheet.count // SHEET_COLUMNS)
    return f"{100 * column / (SHEET_COLUMNS - 1):.3f}% {100 * row / max(1, rows - 1):.3f}%"
