"""Sentences about the drift test: detected shifts, the class mix, and the smallest detectable
shift."""

from evernear.common.output import quantity
from evernear.data.drift import MIN_QUERIES, POWER, SAMPLE, Shift
from evernear.triggers.watch.observe import ClassShare, Drift

_CLASSES = 3
_MIX_DIFFERENCE = 0.1
"""Smallest difference in a class share for which the class mix is mentioned."""


def drift_reasons(drift: Drift) -> list[str]:
    """One sentence for each detected shift."""
    return [_shift_sentence(shift, drift) for shift in drift.shifts if shift.detected]


def no_drift_reasons(drift: Drift) -> list[str]:
    """The reason why no drift was detected, and the smallest shift that would have been
    detected."""
    queries = f"{quantity(drift.queries, 'live query', 'live queries')}{_age(drift)}"
    if drift.shifts:
        return [f"No drift in {queries}{_independent(drift)}.", _detectable(drift)]
    if drift.reference < MIN_QUERIES:
        return [
            f"Drift was not tested: the release was measured on {quantity(drift.reference, 'image')} of its query and"
            f" test splits, and the tests need {MIN_QUERIES}."
        ]
    sampled = f"{quantity(drift.sampled, 'live query', 'live queries')}{_age(drift)}"
    if drift.gap_s and drift.independent < MIN_QUERIES:
        return [f"Drift was not tested: {sampled} sampled{_independent(drift)}, and the tests need {MIN_QUERIES}."]
    return [f"Only {sampled} sampled, too few to test for drift."]


def mix_remarks(drift: Drift) -> list[str]:
    """A remark about the classes whose share in the live queries differs from their share in the
    reference. A different class mix is not drift.

    The list is empty if drift was not tested or was detected, because drift may make one class look
    like a different class.
    """
    if not drift.shifts or any(shift.detected for shift in drift.shifts):
        return []
    named = [share for share in drift.mix if abs(share.live - share.reference) >= _MIX_DIFFERENCE][:_CLASSES]
    if not named:
        return []
    return [f"The mix of classes differs, which is not drift: {', '.join(map(_share, named))}."]


def _share(share: ClassShare) -> str:
    return f"{share.live:.0%} {share.label} (reference {share.reference:.0%})"


def _age(drift: Drift) -> str:
    hours = drift.window_s / 3600
    return f" of the last {f'{hours:.0f} h' if hours < 48 else f'{hours / 24:.1f} days'}"


def _independent(drift: Drift) -> str:
    """A remark about dependent queries, or an empty string."""
    if not drift.gap_s:
        return ""
    return f", of which {drift.independent:,} at least {drift.gap_s:g} s apart count, because close ones are alike"


def _detectable(drift: Drift) -> str:
    units = {
        "unknown_rise": ("a rise of the unknown rate by {:.1f} points", 100),
        "distance_shift": ("a Kolmogorov-Smirnov statistic of {:.2f}", 1),
        "embedding_shift": ("an energy coefficient of {:.3f}", 1),
    }
    shifts = [units[shift.measure][0].format(shift.detectable * units[shift.measure][1]) for shift in drift.shifts]
    samples = f"{min(SAMPLE, drift.independent):,} queries and {quantity(drift.reference, 'reference image')}"
    return (
        f"With {samples}, the smallest shifts that are found in {POWER:.0%} of cases are {', '.join(shifts[:-1])} and"
        f" {shifts[-1]}."
    )


def _shift_sentence(shift: Shift, drift: Drift) -> str:
    count = f"{quantity(drift.queries, 'query', 'queries')}{_age(drift)}"
    certainty = f"p = {shift.p:.1g}, significant below {shift.level:.1g}; {count}{_independent(drift)}"
    match shift.measure:
        case "unknown_rise":
            return (
                f"{drift.unknown_rate:.1%} of the live queries are unknown, compared with"
                f" {drift.reference_unknown_rate:.1%} of the champion's reference ({certainty})."
            )
        case "distance_shift":
            return (
                f"Distances to the gallery have shifted: Kolmogorov-Smirnov statistic {shift.effect:.2f}, bound"
                f" {shift.bound:.2f} ({certainty})."
            )
        case "embedding_shift":
            return (
                f"Embeddings of live queries have shifted: energy coefficient {shift.effect:.3f}, bound"
                f" {shift.bound:.3f} ({certainty})."
            )
