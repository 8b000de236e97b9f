"""Prometheus metrics of the watcher's last check: the champion's live accuracy, and the class
mix."""

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from evernear.triggers.watch.schedule_state import CheckReport

FIGURES = {
    "live_labels": "Live queries of the champion that were labeled in this month and the one before.",
    "live_accuracy": "Accuracy of the champion on these queries.",
    "live_accuracy_low": "Lower end of the 95% interval of evernear_live_accuracy.",
    "live_accuracy_high": "Upper end of the 95% interval of evernear_live_accuracy.",
    "class_mix_difference": "Share of live queries that would need another predicted class for the reference's mix.",
}
"""Figures in a `CheckReport` that are exported as ``evernear_<figure>`` with the label
``version``."""


def exposition(report: CheckReport | None) -> bytes:
    """The metrics in Prometheus text format. A metric has no value before the first check or before
    the first label."""
    registry = CollectorRegistry()
    for figure, meaning in FIGURES.items():
        gauge = Gauge(f"evernear_{figure}", meaning, ("version",), registry=registry)
        if report and figure in report.figures:
            gauge.labels(report.champion).set(report.figures[figure])
    return generate_latest(registry)
