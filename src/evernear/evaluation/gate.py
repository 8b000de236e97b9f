"""The gate: decide whether the candidate may replace the champion.

A candidate passes unless a rule fails. If a rule fails, the verdict is hold. The
candidate need not be better than the champion. Otherwise, a champion whose accuracy
cannot improve could never be refreshed with new data. The candidate must not be
*significantly worse* than the champion, must keep every class, and must be sound. The
gate fails closed. A missing or NaN figure fails its rule.

Paired test (`no_worse`)
    An exact one-sided McNemar test on the same queries
    (`evernear.evaluation.compare.mcnemar_worse`). With ``data.group``, a sign-flip test
    counts groups instead of queries (`evernear.evaluation.grouped.sign_flip_worse`).
    The rule fails if p <= 0.8 x ``gate.significance``. An anchor other than the
    champion takes half of this level for its own test. The rule for the classes uses
    the remaining share of ``gate.significance``. The probability that these tests
    together hold an equally good candidate is therefore at most ``gate.significance``.
    An exact test is used, because a mid-p test maintains the level only approximately.
    docs/decisions/0007-the-gate-asks-not-worse.md explains why the level is 0.10, and
    how often the rules err.

    A non-inferiority test requires evidence that any loss is within a margin. It would
    hold more bad models, but also every equal model on a small test split. On small
    test splits, this rule has less power than on large splits, so the floors matter
    more.

    Queries of classes that the champion does not know are excluded. The champion is
    always wrong on these queries, so the gain from a new class would hide losses on
    other classes. The floors decide whether a new class is recognized well enough.

    Each of several promotions may lose so little accuracy that no single test detects
    the loss. The rules for the anchor (`evernear.evaluation.gate_anchor`) and the
    accuracy floor limit the total loss.

Test set (`same_test_set`)
    The choice of test images can decide the comparison. The test split must therefore
    still contain at least ``gate.test_overlap_floor`` of the champion's test images.
    Added images are allowed. A different source or different split fractions result in
    a different dataset. A release that was measured on a different dataset can only be
    promoted manually.

Classes (`classes_kept`, `class_recall_floor`, `class_recall_drop`)
    The candidate must know every class that the champion can predict, except the
    classes in ``classes.retired`` and ``classes.renamed``. A renamed class is compared
    under its new name. A class fails the recall floor if even the upper limit of its
    interval is below the floor. A class fails the drop rule if its recall fell by more
    than ``gate.class_recall_drop`` *and* is significantly worse at 0.2 x
    ``gate.significance`` divided by the number of classes (Bonferroni). Significance is
    required because a single image in a class of 18 images changes the recall by 5.6
    points. A class without a test image cannot be measured. The reason names such a
    class.

Known images called unknown (`false_rejects`)
    The rule fails if the lower limit of the interval is above
    ``gate.false_reject_ceiling``. On a small test split, the share may exceed the
    ceiling by chance. If test images are called unknown significantly more often than
    the query images that set the threshold, the reason says so. In this case, the test
    images look different from the gallery.

Live queries (`replay`)
    The candidate must not change more of the champion's answers to stored live queries
    than the differences on the test split explain. See `evernear.evaluation.replay`.

First release (`beats_baselines`)
    Without a champion, the candidate must be significantly more accurate than two
    trivial recognizers on the same test images, by the same exact test at
    ``gate.significance``. One recognizer always predicts the most common class. The
    other recognizer predicts the class of the gallery image with the nearest pixels
    (`evernear.evaluation.baselines`). A baseline may have so few errors that no
    candidate could be significantly better. Such a baseline must not be significantly
    better than the candidate.
"""

from collections.abc import Iterator

from evernear.common.output import quantity
from evernear.evaluation.coverage import classes_tested
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.gate_anchor import (
    Anchor,
    anchor_rules,
    choose_anchor,
    detectable_loss_rule,
    levels,
    smallest_detectable_loss,
)
from evernear.evaluation.gate_baselines import beats_baselines_rule
from evernear.evaluation.gate_classes import class_recall_drop_rule, class_recall_floor_rule, classes_kept_rule
from evernear.evaluation.gate_unknown import false_reject_rule
from evernear.evaluation.measure import Measurement
from evernear.evaluation.replay import replay_rule
from evernear.evaluation.verdict import Rule, System, Verdict, floor_setting
from evernear.settings import GateSettings


def decide(evaluation: Evaluation, settings: GateSettings) -> Verdict:
    """Apply every rule to ``evaluation``. The module docstring explains the rules."""
    champion = evaluation.champion
    anchor = choose_anchor(evaluation, champion, settings) if champion else None
    loss = _detectable_loss(evaluation, anchor, settings) if anchor else None
    sensitivity = [detectable_loss_rule(loss, settings)] if loss else []
    is_caution = loss is not None and loss > settings.max_undetected_loss
    rules = [*_rules(evaluation, anchor, settings), *sensitivity]
    unproven = [rule.reason for rule in rules if rule.name == "beats_baselines" and not rule.could_fail]
    return Verdict.of(
        rules,
        candidate=_system(evaluation.candidate),
        champion=_system(champion) if champion else None,
        dataset_digest=evaluation.candidate.dataset_digest,
        anchor=anchor.choice if anchor else None,
        detectable_loss=loss,
        caution=sensitivity[0].reason if is_caution else " ".join(unproven),
    )


def _detectable_loss(evaluation: Evaluation, anchor: Anchor, settings: GateSettings) -> float | None:
    """The smallest loss that the comparisons detect, or None if there is no query to
    compare.
    """
    assert evaluation.champion is not None  # noqa: S101 - an anchor is chosen only with a champion
    pairs = evaluation.comparison.within(evaluation.champion.known_labels) if evaluation.comparison else None
    return smallest_detectable_loss(anchor, pairs, settings) if pairs and pairs.queries else None


def _rules(evaluation: Evaluation, anchor: Anchor | None, settings: GateSettings) -> Iterator[Rule]:
    candidate = evaluation.candidate
    yield _accuracy_floor(candidate, settings)
    yield class_recall_floor_rule(candidate, settings)
    yield false_reject_rule(evaluation, settings)
    yield _index_recall(candidate, settings)
    yield _parity(candidate, settings)
    yield _test_images_unseen(evaluation)
    if evaluation.champion is None or anchor is None:
        yield beats_baselines_rule(evaluation, settings)
    else:
        yield _same_test_set(evaluation, evaluation.champion, settings)
        yield _same_queries(evaluation, evaluation.champion)
        yield _no_worse(evaluation, evaluation.champion, levels(anchor, settings)[0])
        yield from anchor_rules(anchor, candidate, settings)
        yield classes_kept_rule(candidate, evaluation.champion, evaluation.classes)
        yield class_recall_drop_rule(evaluation, evaluation.champion, settings)
        if evaluation.replay is not None:
            yield replay_rule(evaluation.replay, settings)


def _accuracy_floor(candidate: Measurement, settings: GateSettings) -> Rule:
    accuracy, floor = candidate.accuracy, settings.accuracy_floor
    passed = accuracy.value >= floor
    tested = classes_tested(candidate.coverage)
    reason = f"Accuracy is {accuracy} on {_queries(accuracy.total, candidate.groups)}{f' ({tested})' if tested else ''}"
    if floor or not passed:
        reason += f", {'at least' if passed else 'below'} the floor of {floor:.2%}"
    return Rule(
        name="accuracy_floor",
        passed=passed,
        candidate=accuracy.value,
        bound=floor,
        reason=f"{reason}.",
        setting="" if passed else floor_setting("gate.accuracy_floor", accuracy.value),
    )


def _index_recall(candidate: Measurement, settings: GateSettings) -> Rule:
    recall, floor = candidate.index_recall, settings.index_recall_floor
    passed = recall.value >= floor
    reason = (
        f"The index finds the exact nearest neighbor for {recall} of the queries, "
        f"{'at least' if passed else 'less than'} {floor:.2%}."
    )
    setting = "" if passed else floor_setting("gate.index_recall_floor", recall.value)
    return Rule(name="index_recall", passed=passed, candidate=recall.value, bound=floor, reason=reason, setting=setting)


def _parity(candidate: Measurement, settings: GateSettings) -> Rule:
    difference, bound = candidate.parity_max_abs_difference, settings.parity_tolerance
    passed = difference <= bound
    reason = (
        f"The exported network differs from the trained one by {difference:.1e}, "
        f"{'within' if passed else 'not within'} {bound:.1e}."
    )
    return Rule(name="parity", passed=passed, candidate=difference, bound=bound, reason=reason)


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
        reason += f" The champion was built from {quantity(known, 'test image')}, so its accuracy is overstated."
    elif evaluation.champion and evaluation.champion_leakage is None:
        missing = "cannot be read" if "champion" in evaluation.unreadable else "is not in the store"
        reason += f" The champion's dataset {missing}, so its leakage was not measured."
    return Rule(name="test_images_unseen", passed=passed, candidate=float(leaked), bound=0.0, reason=reason)


def _same_test_set(evaluation: Evaluation, champion: Measurement, settings: GateSettings) -> Rule:
    overlap, floor = evaluation.champion_test_overlap, settings.test_overlap_floor
    passed = overlap is not None and overlap >= floor
    if fault := evaluation.unreadable.get("champion"):
        reason = (
            f"The dataset of {champion.name} cannot be read, so its test images are unknown: {fault} A person may "
            "still promote the release."
        )
    elif overlap is None:
        reason = f"The dataset of {champion.name} is not in the store, so its test images are unknown."
    elif passed:
        reason = f"The test split contains {overlap:.1%} of the images that {champion.name} was tested on."
        if evaluation.reviewed_left_out.get("test"):
            reason += " Images that came by review do not count."
    else:
        reason = (
            f"The test split contains only {overlap:.1%} of the images that {champion.name} was tested on, below "
            f"{floor:.0%}: the dataset has another source or other splits, so the accuracies are not comparable. A "
            "person may still promote the release."
        )
    setting = "" if passed or overlap is None else floor_setting("gate.test_overlap_floor", overlap)
    return Rule(name="same_test_set", passed=passed, candidate=overlap, bound=floor, reason=reason, setting=setting)


def _same_queries(evaluation: Evaluation, champion: Measurement) -> Rule:
    candidate, pairs = evaluation.candidate, evaluation.comparison
    passed = (
        pairs is not None
        and candidate.dataset_digest == champion.dataset_digest
        and candidate.queries_sha256 == champion.queries_sha256
        and candidate.accuracy.total == champion.accuracy.total == pairs.overall.queries
    )
    reason = (
        f"Candidate and champion answered the same {quantity(candidate.accuracy.total, 'query', 'queries')}."
        if passed
        else "Candidate and champion were not measured on the same queries, so they cannot be compared."
    )
    return Rule(name="same_queries", passed=passed, reason=reason)


def _no_worse(evaluation: Evaluation, champion: Measurement, level: float) -> Rule:
    known = champion.known_labels
    if evaluation.comparison is None:
        return Rule(name="no_worse", passed=False, bound=level, reason="The comparison with the champion is missing.")
    pairs = evaluation.comparison.within(known)
    if not pairs.queries:
        reason = "The test split contains no image of a class that the champion knows, so nothing can be compared."
        return Rule(name="no_worse", passed=False, bound=level, reason=reason)
    accuracy, champion_accuracy, where = evaluation.candidate.accuracy.value, champion.accuracy.value, ""
    if pairs.queries < evaluation.comparison.overall.queries:
        accuracy, champion_accuracy = _accuracy_within(evaluation.candidate, known), _accuracy_within(champion, known)
        where = f" on the {quantity(pairs.queries, 'image')} of classes that it knows"
    passed = pairs.p_worse > level
    reason = (
        f"Accuracy {accuracy:.2%} against the champion's {champion_accuracy:.2%}{where}: {pairs.changes()}, "
        f"{'not ' if passed else ''}significantly worse ({pairs.p_in_words()}, level {level:g})."
    )
    return Rule(
        name="no_worse", passed=passed, candidate=accuracy, champion=champion_accuracy, bound=level, reason=reason
    )


def _queries(images: int, groups: int | None) -> str:
    return quantity(images, "test image") + (f" of {quantity(groups, 'group')}" if groups else "")


def _accuracy_within(measurement: Measurement, labels: tuple[str, ...]) -> float:
    recalls = [measurement.class_recall[label] for label in labels if label in measurement.class_recall]
    return sum(recall.count for recall in recalls) / max(1, sum(recall.total for recall in recalls))


def _system(measurement: Measurement) -> System:
    return System(
        name=measurement.name, network_sha256=measurement.network_sha256, index_digest=measurement.index_digest
    )
