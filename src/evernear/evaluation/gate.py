"""The gate: decide whether the candidate may replace the champion.

The verdict is hold if any rule fails. The candidate need not be better, or a champion whose
labels are all right could never be refreshed with new data. It must not be *significantly
worse*, must keep every class, and must be sound. The gate fails closed: a missing or NaN figure
fails its rule. A rule that could not fail on this data has not passed: it says "too few to tell".

All tests share ``gate.significance``, the largest probability that they hold an equally good
candidate (docs/decisions/0007-the-gate-asks-not-worse.md).

`no_worse`
    An exact one-sided McNemar test on the same queries or, with ``data.group``, a sign-flip test of
    groups. It uses 0.8 of the level, which it shares with the test against an anchor. A
    non-inferiority test would hold every equal model on a small test split. There, this rule has
    less power, so it states the smallest loss that the gate detects, and fails if this is too large
    and ``gate.on_undetected_loss = hold``. Queries of classes that the champion does not know are
    excluded, because the gain from a new class would hide losses on others.

`no_worse_than_anchor`, `accuracy_floor`
    Limit the total of losses that no single test detects (`evernear.evaluation.gate_anchor`).

`same_test_set`, `test_images_unseen`
    The choice of test images can decide the comparison. The test split must therefore still contain
    at least `TEST_OVERLAP_FLOOR` of the champion's test images. Added images are allowed. No test
    image may be among the images that the candidate was built from.

`classes_kept`, `class_recall`
    The candidate must know every class of the champion, except those in ``classes.retired`` and
    ``classes.renamed``. A class fails if even the upper limit of its interval is below
    ``gate.class_recall_floor``, or if its recall fell by more than `LARGEST_DROP` *and*
    significantly, at 0.2 of the level divided by the number of classes (Bonferroni).

`false_rejects`
    Fails if the lower limit of the interval is above ``gate.false_reject_ceiling``. If test images
    are called unknown significantly more often than the query images that set the threshold, the
    reason says so: they look different from the gallery.

`beats_baselines`
    A first release must be significantly more accurate than two trivial recognizers on the same
    test images (`evernear.evaluation.baselines`). If one has so few errors that no candidate could
    be significantly better, it must not be significantly better than the candidate. If the test
    images are too few for either outcome, a release of grouped images is held, and any other is
    promoted with a warning.
"""

from collections.abc import Iterator, Sequence

from evernear.common.output import quantity
from evernear.evaluation.baselines import Baseline
from evernear.evaluation.compare import PairedCounts
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.gate_anchor import (
    MAX_UNDETECTED_LOSS,
    TEST_OVERLAP_FLOOR,
    choose_anchor,
    levels,
    no_worse_than_anchor_rule,
    sensitivity,
    smallest_detectable_loss,
)
from evernear.evaluation.gate_classes import class_recall_rule, classes_kept_rule
from evernear.evaluation.gate_unknown import false_accept_rule, false_reject_rule
from evernear.evaluation.measure import Measurement
from evernear.evaluation.statistics import p_by_chance
from evernear.evaluation.verdict import Rule, System, Verdict, classes_tested, floor_setting
from evernear.settings import GateSettings


def decide(evaluation: Evaluation, settings: GateSettings) -> Verdict:
    candidate, champion = evaluation.candidate, evaluation.champion
    rules: list[Rule | None] = list(_rules_of_candidate(evaluation, settings))
    caution, anchor, loss = "", None, None
    if champion is None:
        baselines = beats_baselines_rule(evaluation, settings)
        rules.insert(0, baselines)
        caution = "" if baselines.could_fail else baselines.reason
    else:
        anchor, pairs = choose_anchor(evaluation, champion), _known_pairs(evaluation, champion)
        loss = smallest_detectable_loss(anchor, pairs, settings) if pairs else None
        rules += [
            _same_test_set(evaluation, champion),
            _no_worse(evaluation, champion, levels(anchor, settings)[0], loss, settings),
            no_worse_than_anchor_rule(anchor, candidate, settings),
            classes_kept_rule(candidate, champion, evaluation.classes),
            false_accept_rule(evaluation),
        ]
        caution = sensitivity(loss) if loss is not None and loss > MAX_UNDETECTED_LOSS else ""
    return Verdict.of(
        (rule for rule in rules if rule),
        candidate=_system(candidate),
        champion=_system(champion) if champion else None,
        dataset_digest=candidate.dataset_digest,
        anchor=anchor.choice if anchor else None,
        detectable_loss=loss,
        caution=caution,
    )


def _rules_of_candidate(evaluation: Evaluation, settings: GateSettings) -> Iterator[Rule]:
    yield _accuracy_floor(evaluation.candidate, settings)
    yield class_recall_rule(evaluation, settings)
    yield false_reject_rule(evaluation, settings)
    yield _test_images_unseen(evaluation)


def _known_pairs(evaluation: Evaluation, champion: Measurement) -> PairedCounts | None:
    """The comparison on the classes that the champion knows, or None without such queries."""
    pairs = evaluation.comparison.within(champion.known_labels) if evaluation.comparison else None
    return pairs if pairs and pairs.queries else None


def _accuracy_floor(candidate: Measurement, settings: GateSettings) -> Rule:
    label_right, floor = candidate.label_right, settings.accuracy_floor
    passed = label_right.value >= floor
    tested = classes_tested(candidate.coverage)
    images = f"{_queries(label_right.total, candidate.groups)}{f' ({tested})' if tested else ''}"
    reason = f"Label right: {label_right} on {images}"
    if floor or not passed:
        reason += f", {'at least' if passed else 'below'} the floor of {floor:.2%}"
    return Rule(
        name="accuracy_floor",
        passed=passed,
        candidate=label_right.value,
        bound=floor,
        reason=f"{reason}.",
        setting="" if passed else floor_setting("gate.accuracy_floor", label_right.value),
    )


def _test_images_unseen(evaluation: Evaluation) -> Rule:
    leaked = sum(evaluation.leakage.values())
    near = evaluation.near_duplicates if evaluation.near_duplicates and evaluation.near_duplicates.is_leak else None
    # An empty mapping is no evidence that test images are unseen.
    passed = bool(evaluation.leakage) and leaked == 0 and near is None
    splits = ", ".join(f"{count:,} in {split}" for split, count in evaluation.leakage.items() if count)
    reason = "The candidate was not built from any test image."
    if near is not None:
        reason += f" But {near.sentence()}"
    if leaked or not evaluation.leakage:
        reason = f"The candidate was built from test images: {splits}." if splits else "Test leakage was not measured."
        if fault := evaluation.unreadable.get("training"):
            reason += f" The snapshot that its network was trained on cannot be read: {fault}"
    if evaluation.champion_leakage and sum(evaluation.champion_leakage.values()):
        known = sum(evaluation.champion_leakage.values())
        reason += f" The champion was built from {quantity(known, 'test image')}, so its figures are overstated."
    elif evaluation.champion and evaluation.champion_leakage is None:
        missing = "cannot be read" if "champion" in evaluation.unreadable else "is not in the store"
        reason += f" The champion's dataset {missing}, so its leakage was not measured."
    return Rule(name="test_images_unseen", passed=passed, candidate=float(leaked), bound=0.0, reason=reason)


def _same_test_set(evaluation: Evaluation, champion: Measurement) -> Rule:
    overlap = evaluation.champion_test_overlap
    if not _answered_the_same(evaluation, champion):
        passed = False
        reason = "Candidate and champion were not measured on the same queries, so they cannot be compared."
    else:
        passed = overlap is not None and overlap >= TEST_OVERLAP_FLOOR
        reason = _overlap_in_words(evaluation, champion.name, overlap, passed)
    return Rule(name="same_test_set", passed=passed, candidate=overlap, bound=TEST_OVERLAP_FLOOR, reason=reason)


def _answered_the_same(evaluation: Evaluation, champion: Measurement) -> bool:
    candidate, pairs = evaluation.candidate, evaluation.comparison
    return (
        pairs is not None
        and candidate.dataset_digest == champion.dataset_digest
        and candidate.queries_sha256 == champion.queries_sha256
        and candidate.label_right.total == champion.label_right.total == pairs.overall.queries
    )


def _overlap_in_words(evaluation: Evaluation, champion: str, overlap: float | None, passed: bool) -> str:
    if fault := evaluation.unreadable.get("champion"):
        return (
            f"The dataset of {champion} cannot be read, so its test images are unknown: {fault} A person may still "
            "promote the release."
        )
    if overlap is None:
        return f"The dataset of {champion} is not in the store, so its test images are unknown."
    if not passed:
        return (
            f"The test split contains only {overlap:.1%} of the images that {champion} was tested on, below "
            f"{TEST_OVERLAP_FLOOR:.0%}: the dataset has another source or other splits, so the figures are not "
            "comparable. A person may still promote the release."
        )
    left_out = " Images that came by review do not count." if evaluation.reviewed_left_out.get("test") else ""
    return f"The test split contains {overlap:.1%} of the images that {champion} was tested on.{left_out}"


def _no_worse(
    evaluation: Evaluation, champion: Measurement, level: float, loss: float | None, settings: GateSettings
) -> Rule:
    """``loss`` is the smallest loss that the gate detects."""
    name, pairs, known = "no_worse", _known_pairs(evaluation, champion), champion.known_labels
    if evaluation.comparison is None:
        return Rule(name=name, passed=False, bound=level, reason="The comparison with the champion is missing.")
    if pairs is None or loss is None:
        reason = "The test split contains no image of a class that the champion knows, so nothing can be compared."
        return Rule(name=name, passed=False, bound=level, reason=reason)
    is_worse = pairs.p_worse <= level
    could_fail = pairs.least_p(_right_within(champion, known)) <= level
    where = (
        f" on the {quantity(pairs.queries, 'image')} of classes that it knows"
        if pairs.queries < evaluation.comparison.overall.queries
        else ""
    )
    share, before = (_share_right(each, known) for each in (evaluation.candidate, champion))
    figures = f"Label right {share:.2%} against the champion's {before:.2%}{where}: {pairs.changes()}"
    if could_fail:
        figures += f", {'' if is_worse else 'not '}significantly worse ({pairs.p_in_words()}, level {level:g})"
    else:
        figures = f"Too few images to tell whether the candidate is worse. {figures}"
    is_blind = loss > MAX_UNDETECTED_LOSS and settings.on_undetected_loss == "hold"
    reason = f"{figures}. {sensitivity(loss)}"
    if is_blind:
        reason += " The run promotes nothing without a person (gate.on_undetected_loss = hold)."
    return Rule(
        name=name,
        passed=not is_worse and not is_blind,
        could_fail=could_fail or is_blind,
        candidate=share,
        champion=before,
        bound=level,
        reason=reason,
        setting="gate.on_undetected_loss=warn" if is_blind and not is_worse else "",
    )


def _queries(images: int, groups: int | None) -> str:
    return quantity(images, "test image") + (f" of {quantity(groups, 'group')}" if groups else "")


def _share_right(measurement: Measurement, labels: tuple[str, ...]) -> float:
    shares = measurement.class_label_right
    total = sum(shares[label].total for label in labels if label in shares)
    return _right_within(measurement, labels) / max(1, total)


def _right_within(measurement: Measurement, labels: tuple[str, ...]) -> int:
    shares = measurement.class_label_right
    return sum(shares[label].count for label in labels if label in shares)


def _system(measurement: Measurement) -> System:
    return System(
        name=measurement.name, network_sha256=measurement.network_sha256, index_digest=measurement.index_digest
    )


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
        candidate=evaluation.candidate.label_right.value,
        bound=max(baseline.label_right.value for baseline in baselines),
        reason=f"The store has no champion yet. {reason}" if missed or not undecided else reason,
        could_fail=bool(missed or not undecided),
        setting="gate.beat_baseline=false" if is_unproven else "",
    )


def _is_missed(baseline: Baseline, level: float) -> bool:
    """Whether the candidate is not better than a baseline that it could have beaten, or is worse
    than any other baseline."""
    pairs = baseline.comparison
    return pairs.p_better > level if baseline.must_be_beaten(level) else pairs.p_worse <= level


def _passed(evaluation: Evaluation, level: float) -> str:
    beaten = [baseline for baseline in evaluation.baselines if baseline.must_be_beaten(level)]
    others = [baseline for baseline in evaluation.baselines if baseline not in beaten]
    findings = [f"significantly better than {_figures(beaten)}, at level {level:g}"] if beaten else []
    parts = [baseline for baseline in others if baseline.is_part]
    if few := [baseline for baseline in others if baseline not in parts]:
        findings.append(
            f"not significantly worse than {_names(few)}, which has too few errors to be beaten significantly"
        )
    findings += [f"not significantly worse than {_names(parts)}"] * bool(parts)
    return f"Label right {evaluation.candidate.label_right.value:.2%} is {', and '.join(findings)}."


def _missed(evaluation: Evaluation, missed: Sequence[Baseline], level: float) -> str:
    unbeaten = [baseline for baseline in missed if baseline.must_be_beaten(level)]
    better = [baseline for baseline in missed if baseline not in unbeaten]
    findings = [f"not significantly better than {_figures(unbeaten)}"] if unbeaten else []
    findings += [f"significantly worse than {_names(better)}"] if better else []
    share = evaluation.candidate.label_right.value
    return f"Label right {share:.2%} is {', and '.join(findings)}, at level {level:g}.{_diagnosis(evaluation, level)}"


def _undecided(evaluation: Evaluation, undecided: Sequence[Baseline], level: float) -> str:
    share, few = evaluation.candidate.label_right.value, evaluation.few_groups
    best = max(undecided, key=lambda baseline: baseline.p_perfect)
    p = best.comparison.p_in_words(best.p_perfect)
    text = (
        f"Too few {'groups of images' if evaluation.candidate.groups else 'images'} to tell whether label right "
        f"{share:.2%} is better than {_names(undecided)}: not even a release without errors would be significantly "
        f"better ({p}, level {level:g})."
    )
    return f"{text} {few.sentence()}" if few else text


def _figures(baselines: Sequence[Baseline]) -> str:
    return " and ".join(
        f"{each.name} ({each.label_right.value:.2%}, {each.comparison.changes()}, "
        f"{each.comparison.p_in_words(each.comparison.p_better)})"
        for each in baselines
    )


def _names(baselines: Sequence[Baseline]) -> str:
    return " and ".join(f"{each.name} ({each.label_right.value:.2%})" for each in baselines)


def _diagnosis(evaluation: Evaluation, level: float) -> str:
    """The likely cause if the predictions are no better than chance. Empty if they are better, or
    if there are too few images to decide.

    The baseline that finds the nearest image by pixels needs no training and is nearly always
    better than chance. If it is, the labels match the images, so the training has failed.
    """
    candidate = evaluation.candidate
    chance = candidate.most_common_class_proportion
    is_informed = p_by_chance(pair[:3] for pair in candidate.confusions) <= level
    if is_informed or candidate.label_right.high >= (1 + chance) / 2:
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
