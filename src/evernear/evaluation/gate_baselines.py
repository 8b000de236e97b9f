"""The gate's rule for a first release, which has no champion to be compared with. The docstring of
`evernear.evaluation.gate` explains it."""

from collections.abc import Sequence

from evernear.evaluation.baselines import Baseline
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.statistics import p_by_chance
from evernear.evaluation.verdict import Rule
from evernear.settings import GateSettings


def beats_baselines_rule(evaluation: Evaluation, settings: GateSettings) -> Rule:
    name, baselines, level = "beats_baselines", evaluation.baselines, settings.significance
    if not baselines:
        return Rule(name=name, passed=False, reason="The trivial baselines were not measured.")
    missed = [baseline for baseline in baselines if _is_missed(baseline, level)]
    undecided = [baseline for baseline in baselines if baseline.is_undecided(level)]
    if missed:
        reason = _missed(evaluation, missed, level)
    elif undecided:
        reason = _undecided(evaluation, undecided, level)
    else:
        reason = _passed(evaluation, level)
    # a group's images resemble each other: few groups are less evidence than as many images
    is_unproven = bool(missed or (undecided and evaluation.candidate.groups))
    return Rule(
        name=name,
        passed=not is_unproven or not settings.beat_baseline,
        candidate=evaluation.candidate.accuracy.value,
        bound=max(baseline.accuracy.value for baseline in baselines),
        reason=f"The store has no champion yet. {reason}" if missed or not undecided else reason,
        could_fail=bool(missed or not undecided),
        setting="gate.beat_baseline=false" if is_unproven else "",
    )


def _is_missed(baseline: Baseline, level: float) -> bool:
    """Whether the candidate is not better than a baseline that it could have beaten, or is worse
    than any other baseline."""
    pairs = baseline.comparison
    return pairs.p_better > level if baseline.p_perfect <= level else pairs.p_worse <= level


def _passed(evaluation: Evaluation, level: float) -> str:
    beaten = [baseline for baseline in evaluation.baselines if baseline.p_perfect <= level]
    others = [baseline for baseline in evaluation.baselines if baseline not in beaten]
    findings = [f"significantly better than {_figures(beaten)}, at level {level:g}"] if beaten else []
    if others:
        findings.append(
            f"not significantly worse than {_names(others)}, which has too few errors to be beaten significantly"
        )
    return f"Accuracy {evaluation.candidate.accuracy.value:.2%} is {', and '.join(findings)}."


def _missed(evaluation: Evaluation, missed: Sequence[Baseline], level: float) -> str:
    unbeaten = [baseline for baseline in missed if baseline.p_perfect <= level]
    better = [baseline for baseline in missed if baseline not in unbeaten]
    findings = [f"not significantly better than {_figures(unbeaten)}"] if unbeaten else []
    findings += [f"significantly worse than {_names(better)}"] if better else []
    accuracy = evaluation.candidate.accuracy.value
    return f"Accuracy {accuracy:.2%} is {', and '.join(findings)}, at level {level:g}.{_diagnosis(evaluation, level)}"


def _undecided(evaluation: Evaluation, undecided: Sequence[Baseline], level: float) -> str:
    accuracy, few = evaluation.candidate.accuracy.value, evaluation.few_groups
    best = max(undecided, key=lambda baseline: baseline.p_perfect)
    p = best.comparison.p_in_words(best.p_perfect)
    text = (
        f"Too few {'groups of images' if evaluation.candidate.groups else 'images'} to tell whether accuracy "
        f"{accuracy:.2%} is better than {_names(undecided)}: not even a release without errors would be significantly "
        f"better ({p}, level {level:g})."
    )
    return f"{text} {few.sentence()}" if few else text


def _figures(baselines: Sequence[Baseline]) -> str:
    return " and ".join(
        f"{each.name} ({each.accuracy.value:.2%}, {each.comparison.changes()}, "
        f"{each.comparison.p_in_words(each.comparison.p_better)})"
        for each in baselines
    )


def _names(baselines: Sequence[Baseline]) -> str:
    return " and ".join(f"{each.name} ({each.accuracy.value:.2%})" for each in baselines)


def _diagnosis(evaluation: Evaluation, level: float) -> str:
    """The likely cause if the predictions are no better than chance. Empty if they are better, or
    if there are too few images to decide.

    The baseline that finds the nearest image by pixels needs no training and is nearly always
    better than chance. If it is, the labels match the images, so the training has failed.
    """
    candidate = evaluation.candidate
    chance = candidate.most_common_class_proportion
    is_informed = p_by_chance(candidate.confusions) <= level
    if is_informed or candidate.accuracy.high >= (1 + chance) / 2:
        return ""
    if any(baseline.p_by_chance <= level for baseline in evaluation.baselines):
        return (
            " Predictions are unrelated to the labels, although the nearest image by pixels is better than chance: the "
            "training failed."
        )
    return (
        " Predictions are unrelated to the labels, and so is the nearest image by pixels: the labels do not match the "
        "images, as if they were shuffled, or there are too few images to learn from; look at some of them, add more, "
        "or start from a pretrained backbone (train.weights)."
    )
