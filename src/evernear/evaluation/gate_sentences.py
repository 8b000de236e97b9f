"""Every sentence of the gate, from the figures and the decisions of its rules."""

from collections.abc import Sequence

from evernear.common.output import named, quantity
from evernear.evaluation.baselines import Baseline
from evernear.evaluation.compare import PairedCounts
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.gate_limits import (
    LARGEST_DROP,
    LARGEST_INCREASE,
    MAX_UNDETECTED_LOSS,
    POWER,
    REFUSALS_LEVEL,
    TEST_OVERLAP_FLOOR,
)
from evernear.evaluation.measure import Measurement
from evernear.evaluation.statistics import Interval, Proportion
from evernear.evaluation.verdict import AnchorChoice, classes_tested
from evernear.settings import ClassSettings

_MOVE_ANCHOR = "`evernear registry anchor VERSION --why REASON`"
_ANCHOR_REMEDY = f" If this loss is intended, promote the release and make it the anchor with {_MOVE_ANCHOR}."
_UNKNOWN_REMEDY = " If this is intended, promote the release."

# accuracy_floor, test_images_unseen, same_test_set


def accuracy(candidate: Measurement, floor: float, passed: bool) -> str:
    label_right, tested = candidate.label_right, classes_tested(candidate.coverage)
    images = quantity(label_right.total, "test image")
    groups = f" of {quantity(candidate.groups, 'group')}" if candidate.groups else ""
    reason = f"Label right: {label_right} on {images}{groups}{f' ({tested})' if tested else ''}"
    if floor or not passed:
        reason += f", {'at least' if passed else 'below'} the floor of {floor:.2%}"
    return f"{reason}."


def test_images(evaluation: Evaluation, leaked: int) -> str:
    near = evaluation.near_duplicates
    splits = ", ".join(f"{count:,} in {split}" for split, count in evaluation.leakage.items() if count)
    reason = "The candidate was not built from any test image."
    if near and near.is_leak:
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
    return reason


OTHER_QUERIES = "Candidate and champion were not measured on the same queries, so they cannot be compared."


def overlap(evaluation: Evaluation, champion: str, passed: bool) -> str:
    share = evaluation.champion_test_overlap
    if fault := evaluation.unreadable.get("champion"):
        return (
            f"The dataset of {champion} cannot be read, so its test images are unknown: {fault} A person may still "
            "promote the release."
        )
    if share is None:
        return f"The dataset of {champion} is not in the store, so its test images are unknown."
    if not passed:
        return (
            f"The test split contains only {share:.1%} of the images that {champion} was tested on, below "
            f"{TEST_OVERLAP_FLOOR:.0%}: the dataset has another source or other splits, so the figures are not "
            "comparable. A person may still promote the release."
        )
    left_out = " Images that came by review do not count." if evaluation.reviewed_left_out.get("test") else ""
    return f"The test split contains {share:.1%} of the images that {champion} was tested on.{left_out}"


# no_worse

NO_COMPARISON = "The comparison with the champion is missing."
NO_KNOWN_IMAGES = "The test split contains no image of a class that the champion knows, so nothing can be compared."


def no_worse(
    pairs: PairedCounts,
    shares: tuple[float, float],
    *,
    queries: int,
    level: float,
    could_fail: bool,
    loss: float,
    is_blind: bool,
) -> str:
    """``shares`` are the candidate's and the champion's. ``loss`` is the smallest that the gate
    detects."""
    known = f" on the {quantity(pairs.queries, 'image')} of classes that it knows" if pairs.queries < queries else ""
    share, before = shares
    figures = f"Label right {share:.2%} against the champion's {before:.2%}{known}: {pairs.changes()}"
    if could_fail:
        is_worse = pairs.p_worse <= level
        figures += f", {'' if is_worse else 'not '}significantly worse ({pairs.p_in_words()}, level {level:g})"
    else:
        figures = f"Too few images to tell whether the candidate is worse. {figures}"
    blind = " The run promotes nothing without a person (gate.on_undetected_loss = hold)." if is_blind else ""
    return f"{figures}. {sensitivity(loss)}{blind}"


def sensitivity(loss: float) -> str:
    stated = f"A loss of {100 * loss:.1f} points is detected" if loss < 1 else "No loss is detected"
    if loss <= MAX_UNDETECTED_LOSS:
        return f"{stated} with {POWER:.0%} probability."
    return (
        f"{stated} with {POWER:.0%} probability, and {100 * MAX_UNDETECTED_LOSS:g} points should be: the test split is "
        "too small to notice a smaller loss. Add labeled images, or compare the releases on images of your own."
    )


# no_worse_than_anchor


def anchor_not_measured(version: str, fault: str) -> str:
    return f"The anchor {version} cannot be measured: {fault} {_MOVE_ANCHOR} makes another release the anchor."


def anchor_overlap(share: float | None) -> str:
    known = "none" if share is None else f"{share:.1%}"
    return f"The test split contains {known} of the images that it was tested on, below {TEST_OVERLAP_FLOOR:.0%}."


NO_SHARED_IMAGES = "The test split contains no image of a class that it and the candidate know."


def anchor(
    choice: AnchorChoice,
    pairs: PairedCounts,
    *,
    right: int,
    queries: int,
    is_champion: bool,
    budget: int,
    level: float,
    is_tested: bool,
    could_fail: bool,
    passed: bool,
) -> str:
    """``right`` is the number of the compared images whose label the anchor has right, and
    ``queries`` the number of all test images."""
    reasons: list[str] = []
    if choice.former:
        reasons.append(
            f"The champion takes the place of the anchor {choice.former}, which cannot be compared: {choice.why}"
        )
    if not could_fail:
        reasons.append("Too few images to tell whether the candidate is worse than the anchor.")
    if is_tested:
        verb = "is not" if pairs.p_worse > level else "is"
        known = (
            f" on the {quantity(pairs.queries, 'image')} of classes that both know" if pairs.queries < queries else ""
        )
        reasons.append(
            f"The candidate {verb} significantly worse than the anchor {choice.version}, whose label right is "
            f"{right / pairs.queries:.2%}{known}: {pairs.changes()}, {pairs.p_in_words()}, level {level:g}."
        )
    unit = "test image" if pairs.groups is None else "group of test images"
    units = "test images" if pairs.groups is None else "groups of test images"
    reasons.append(
        f"Against the anchor {choice.version}{', which is the champion,' if is_champion else ','} the "
        f"candidate uses {max(0, pairs.independent.net_losses):,} of a budget of "
        f"{quantity(budget, 'net loss', 'net losses')} on {quantity(pairs.independent.queries, unit, units)} "
        f"({pairs.changes()})."
    )
    return " ".join(reasons) + ("" if passed else _ANCHOR_REMEDY)


# class_recall, classes_kept

NO_CLASS_FIGURES = "Label right by class is missing."
NO_CLASS_COMPARISON = "The comparison by class is missing."
NO_KNOWN_CLASS = "No class that the champion knows has a test image."


def classes_below(fallen: dict[str, Proportion], floor: float) -> str:
    names = named([f"{label} ({share.value:.1%})" for label, share in fallen.items()])
    return f"Label right is significantly below the floor of {floor:.0%} for {names}."


def classes_above(candidate: Measurement, floor: float, worst: str, undecided: Sequence[str], could_fail: bool) -> str:
    shares = candidate.class_label_right
    if could_fail:
        reason = (
            f"Label right is significantly below {floor:.0%} for no class; the worst is {worst} with {shares[worst]}."
        )
        reason += f" Too few images to tell for {named(undecided)}." if undecided else ""
    else:
        reason = (
            f"Too few images to tell whether label right is below {floor:.0%} for a class; the worst is {worst} with "
            f"{shares[worst]}."
        )
    if unmeasured := [label for label in candidate.known_labels if label not in shares]:
        reason += f" Without test images and therefore not measured: {named(unmeasured)}."
    return reason


def classes_fell(fallen: dict[str, float]) -> str:
    names = named([f"{label} by {drop:.1%}" for label, drop in fallen.items()])
    return f"Label right fell significantly and by more than {LARGEST_DROP:.1%} for {names}."


def classes_did_not_fall(label: str, drop: float, undecided: int, could_fail: bool) -> str:
    """``label`` has the largest ``drop``. ``undecided`` classes have too few images."""
    change = f"the worst change is {0.0 - drop:+.1%} for {label}."
    if not could_fail:
        return f"Too few images to tell whether label right fell by more than {LARGEST_DROP:.1%} for a class; {change}"
    others = f" Too few images to tell for {quantity(undecided, 'class', 'classes')}." if undecided else ""
    return f"Label right fell significantly and by more than {LARGEST_DROP:.1%} for no class; {change}{others}"


def classes_kept(candidate: Measurement, missing: Sequence[str], new: Sequence[str], classes: ClassSettings) -> str:
    reason = "The candidate knows every class of the champion."
    if missing:
        reason = f"The candidate lacks classes of the champion: {named(missing)}."
    if new:
        reason += f" New: {named([_class_figures(label, candidate) for label in new])}."
    if classes.retired:
        reason += f" Retired on purpose: {named([*classes.retired])}."
    if classes.renamed:
        reason += f" Renamed: {named([f'{old} to {new}' for old, new in classes.renamed.items()])}."
    return reason


def _class_figures(label: str, measurement: Measurement) -> str:
    answers = measurement.class_answers.get(label)
    if answers is None:
        return label
    shares = (each / answers.images for each in (answers.named_right, answers.named_wrong, answers.called_unknown))
    return "{} ({:.1%} named right, {:.1%} named wrong, {:.1%} called unknown)".format(label, *shares)


# false_rejects, false_accepts

NO_KNOWN_TEST_IMAGES = "No test image is of a class that the candidate knows, so false rejects were not measured."
REFUSALS_NOT_COMPARED = "The images that are called unknown were not compared with the champion's."
TOO_FEW_CLASSES = "Too few classes to hold one out, so it is not known how many images of unseen classes are accepted."
CHAMPION_STATES_NONE = (
    "The champion does not state how many images of unseen classes it accepts, so nothing can be compared."
)
UNKNOWN_OFF = "Unknown is switched off: every image counts as known."


def false_rejects(
    candidate: Measurement, rejected: Proportion, ceiling: float, *, could_fail: bool, is_below: bool, differ: bool
) -> str:
    """``differ`` says whether test images are called unknown significantly more often than query
    images."""
    if not could_fail:
        return (
            f"Too few images to tell whether more than {ceiling:.0%} of known images are called unknown: "
            f"{rejected} of the known test images are."
        )
    reason = (
        f"{rejected} of the known test images are called unknown, "
        f"{'not ' if is_below else ''}significantly more than {ceiling:.0%}."
    )
    return reason + (_different_test_images(candidate) if differ else "")


def refusals(pairs: PairedCounts, is_significant: bool, passed: bool) -> str:
    increase = pairs.net_losses / pairs.queries
    reason = (
        f"Of those that the champion names, the candidate calls {pairs.regressions:,} unknown, and it names "
        f"{pairs.improvements:,} of those that the champion calls unknown"
    )
    if increase > LARGEST_INCREASE:
        reason += (
            f", {increase:.1%} {'' if is_significant else 'but not significantly '}more"
            f" ({pairs.p_in_words()}, level {REFUSALS_LEVEL:g})"
        )
    return f"{reason}.{'' if passed else _UNKNOWN_REMEDY}"


def false_accepts(now: Proportion, before: Interval, is_significant: bool, passed: bool) -> str:
    reason = (
        f"Of images of held-out classes, {now} are accepted as known, {'' if is_significant else 'not '}significantly "
        f"more than the champion's {before}."
    )
    if is_significant and passed:
        reason += f" The increase is at most {LARGEST_INCREASE:.0%}."
    return reason if passed else reason + _UNKNOWN_REMEDY


def _different_test_images(candidate: Measurement) -> str:
    calibrated = candidate.calibration_rejects
    if calibrated is None:
        return ""
    advice = "Add images like the test images to the training images"
    if not candidate.groups:
        advice += (
            ", or, if the images show scenes, shops or persons several times, ingest them into a new store with "
            "data.group, so that whole groups that the gallery lacks set the threshold"
        )
    return (
        f" Your test images look different from your gallery: of the {quantity(calibrated.total, 'query image')}, "
        f"which come from the same files as the gallery and set the threshold, {calibrated.value:.2%} are called "
        f"unknown. {advice}."
    )


# beats_baselines

NO_BASELINES = "The trivial baselines were not measured."
NO_CHAMPION = "The store has no champion yet."


def beaten(evaluation: Evaluation, level: float) -> str:
    first = [baseline for baseline in evaluation.baselines if baseline.must_be_beaten(level)]
    others = [baseline for baseline in evaluation.baselines if baseline not in first]
    findings = [f"significantly better than {_figures(first)}, at level {level:g}"] if first else []
    parts = [baseline for baseline in others if baseline.is_part]
    if few := [baseline for baseline in others if baseline not in parts]:
        findings.append(
            f"not significantly worse than {_names(few)}, which has too few errors to be beaten significantly"
        )
    findings += [f"not significantly worse than {_names(parts)}"] * bool(parts)
    return f"Label right {evaluation.candidate.label_right.value:.2%} is {', and '.join(findings)}."


def missed(evaluation: Evaluation, baselines: Sequence[Baseline], level: float, *, by_chance: bool) -> str:
    """``by_chance`` says whether the predictions are no better than chance.

    The baseline that finds the nearest image by pixels needs no training and is nearly always
    better than chance. If it is, the labels match the images, so the training has failed.
    """
    unbeaten = [baseline for baseline in baselines if baseline.must_be_beaten(level)]
    better = [baseline for baseline in baselines if baseline not in unbeaten]
    findings = [f"not significantly better than {_figures(unbeaten)}"] if unbeaten else []
    findings += [f"significantly worse than {_names(better)}"] if better else []
    share = evaluation.candidate.label_right.value
    text = f"Label right {share:.2%} is {', and '.join(findings)}, at level {level:g}."
    if not by_chance:
        return text
    if any(baseline.p_by_chance <= level for baseline in evaluation.baselines):
        return (
            f"{text} Predictions are unrelated to the labels, although the nearest image by pixels is better than "
            "chance: the training failed."
        )
    return (
        f"{text} Predictions are unrelated to the labels, and so is the nearest image by pixels: the labels do not "
        "match the images, as if they were shuffled, the test images look different from the others, or there are too "
        "few images to learn from; look at some of them, add more, or start from a pretrained backbone (train.weights)."
    )


def undecided(evaluation: Evaluation, baselines: Sequence[Baseline], level: float) -> str:
    share, few = evaluation.candidate.label_right.value, evaluation.few_groups
    best = max(baselines, key=lambda baseline: baseline.p_perfect)
    p = best.comparison.p_in_words(best.p_perfect)
    text = (
        f"Too few {'groups of images' if evaluation.candidate.groups else 'images'} to tell whether label right "
        f"{share:.2%} is better than {_names(baselines)}: not even a release without errors would be significantly "
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
