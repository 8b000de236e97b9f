"""The gate: decide whether the candidate may replace the champion. `gate_sentences` says why.

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

from collections.abc import Iterator

from evernear.evaluation import gate_sentences as sentences
from evernear.evaluation.baselines import Baseline
from evernear.evaluation.compare import PairedCounts
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.gate_anchor import choose_anchor, levels, no_worse_than_anchor_rule, smallest_detectable_loss
from evernear.evaluation.gate_classes import class_recall_rule, classes_kept_rule
from evernear.evaluation.gate_limits import MAX_UNDETECTED_LOSS, TEST_OVERLAP_FLOOR
from evernear.evaluation.gate_unknown import false_accept_rule, false_reject_rule
from evernear.evaluation.measure import Measurement
from evernear.evaluation.statistics import p_by_chance
from evernear.evaluation.verdict import Rule, System, Verdict, floor_setting
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
        caution = sentences.sensitivity(loss) if loss is not None and loss > MAX_UNDETECTED_LOSS else ""
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
    share, floor = candidate.label_right.value, settings.accuracy_floor
    passed = share >= floor
    return Rule(
        name="accuracy_floor",
        passed=passed,
        candidate=share,
        bound=floor,
        reason=sentences.accuracy(candidate, floor, passed),
        setting="" if passed else floor_setting("gate.accuracy_floor", share),
    )


def _test_images_unseen(evaluation: Evaluation) -> Rule:
    leaked = sum(evaluation.leakage.values())
    is_near = evaluation.near_duplicates is not None and evaluation.near_duplicates.is_leak
    return Rule(
        name="test_images_unseen",
        # an empty mapping is no evidence that test images are unseen
        passed=bool(evaluation.leakage) and leaked == 0 and not is_near,
        candidate=float(leaked),
        bound=0.0,
        reason=sentences.test_images(evaluation, leaked),
    )


def _same_test_set(evaluation: Evaluation, champion: Measurement) -> Rule:
    overlap = evaluation.champion_test_overlap
    is_same = _answered_the_same(evaluation, champion)
    passed = is_same and overlap is not None and overlap >= TEST_OVERLAP_FLOOR
    reason = sentences.overlap(evaluation, champion.name, passed) if is_same else sentences.OTHER_QUERIES
    return Rule(name="same_test_set", passed=passed, candidate=overlap, bound=TEST_OVERLAP_FLOOR, reason=reason)


def _answered_the_same(evaluation: Evaluation, champion: Measurement) -> bool:
    candidate, pairs = evaluation.candidate, evaluation.comparison
    return (
        pairs is not None
        and candidate.dataset_digest == champion.dataset_digest
        and candidate.queries_sha256 == champion.queries_sha256
        and candidate.label_right.total == champion.label_right.total == pairs.overall.queries
    )


def _no_worse(
    evaluation: Evaluation, champion: Measurement, level: float, loss: float | None, settings: GateSettings
) -> Rule:
    """``loss`` is the smallest loss that the gate detects."""
    name, pairs, known = "no_worse", _known_pairs(evaluation, champion), champion.known_labels
    if evaluation.comparison is None:
        return Rule(name=name, passed=False, bound=level, reason=sentences.NO_COMPARISON)
    if pairs is None or loss is None:
        return Rule(name=name, passed=False, bound=level, reason=sentences.NO_KNOWN_IMAGES)
    is_worse = pairs.p_worse <= level
    could_fail = pairs.least_p(_right_within(champion, known)) <= level
    is_blind = loss > MAX_UNDETECTED_LOSS and settings.on_undetected_loss == "hold"
    share, before = (_share_right(each, known) for each in (evaluation.candidate, champion))
    return Rule(
        name=name,
        passed=not is_worse and not is_blind,
        could_fail=could_fail or is_blind,
        candidate=share,
        champion=before,
        bound=level,
        reason=sentences.no_worse(
            pairs,
            (share, before),
            queries=evaluation.comparison.overall.queries,
            level=level,
            could_fail=could_fail,
            loss=loss,
            is_blind=is_blind,
        ),
        setting="gate.on_undetected_loss=warn" if is_blind and not is_worse else "",
    )


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
        return Rule(name=name, passed=False, reason=sentences.NO_BASELINES)
    missed = [baseline for baseline in baselines if _is_missed(baseline, level)]
    undecided = [baseline for baseline in baselines if baseline.is_undecided(level)]
    if missed:
        reason = sentences.missed(evaluation, missed, level, by_chance=_is_by_chance(evaluation.candidate, level))
    elif undecided:
        reason = sentences.undecided(evaluation, undecided, level)
    else:
        reason = sentences.beaten(evaluation, level)
    # a group's images resemble each other: few groups are less evidence than as many images
    is_unproven = bool(missed or (undecided and evaluation.candidate.groups))
    could_fail = bool(missed or not undecided)
    return Rule(
        name=name,
        passed=not is_unproven or not settings.beat_baseline,
        candidate=evaluation.candidate.label_right.value,
        bound=max(baseline.label_right.value for baseline in baselines),
        reason=f"{sentences.NO_CHAMPION} {reason}" if could_fail else reason,
        could_fail=could_fail,
        setting="gate.beat_baseline=false" if is_unproven else "",
    )


def _is_missed(baseline: Baseline, level: float) -> bool:
    """Whether the candidate is not better than a baseline that it could have beaten, or is worse
    than any other baseline."""
    pairs = baseline.comparison
    return pairs.p_better > level if baseline.must_be_beaten(level) else pairs.p_worse <= level


def _is_by_chance(candidate: Measurement, level: float) -> bool:
    """False if the predictions are better than chance, or if the images are too few to decide."""
    chance = candidate.most_common_class_proportion
    is_informed = p_by_chance(pair[:3] for pair in candidate.confusions) <= level
    return not is_informed and candidate.label_right.high < (1 + chance) / 2
