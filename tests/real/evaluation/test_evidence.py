"""A first release needs enough test groups to be better than trivial baselines."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evernear.data.shards import Dataset
from evernear.evaluation.baselines import FewGroups, few_groups, find_few_groups, measure_baselines
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.gate import decide
from evernear.evaluation.measure import Outcomes
from evernear.evaluation.verdict import Rule
from evernear.settings import GateSettings, RunSettings, of_run
from tests.small_ingest import dataset_of

FRAMES = 3


def photograph(folder: Path, labels_of_scene: list[str], frames: int = FRAMES) -> Path:
    """Frames of scenes in folders of their classes, which share the scene's background."""
    rng = np.random.default_rng(0)
    for scene, labels in enumerate(labels_of_scene):
        background = rng.integers(0, 128, (12, 12))
        for label in labels:
            (folder / label).mkdir(parents=True, exist_ok=True)
            for frame in range(frames):
                pixels = background + rng.integers(0, 100, (12, 12))
                Image.fromarray(pixels.astype(np.uint8)).save(folder / label / f"scene{scene:02}_{frame}.png")
    return folder


def settings(source: Path, **data: object) -> RunSettings:
    return of_run({"data": {"source": f"folder:{source}", "group": "stem"} | data})


def ingest(chosen: RunSettings, folder: Path) -> Dataset:
    return dataset_of(chosen.data.source, folder / "store", **chosen.data.model_dump(exclude={"source"}))


def first_release(dataset: Dataset, chosen: RunSettings, accuracy: float, grouped: bool = True) -> Evaluation:
    """The evaluation of a candidate that is right on a random share of the test images."""
    from benchmarks import gate as simulation  # imports scipy.stats, which takes seconds

    labels = np.concatenate([block.labels for block in dataset.blocks("test")]).astype(np.int32)
    numbers = None
    if grouped:
        numbers = np.concatenate([block.groups for block in dataset.blocks("test")])
    correct = np.random.default_rng(1).random(len(labels)) < accuracy
    outcomes = Outcomes(correct, labels, numbers)
    baselines = measure_baselines(outcomes, dataset)
    evaluation = simulation.make_evaluation(outcomes, outcomes, dataset.labels)
    groups_of_test = None if numbers is None else len(np.unique(numbers))
    return evaluation.model_copy(
        update={
            "candidate": evaluation.candidate.model_copy(update={"groups": groups_of_test}),
            "champion": None,
            "comparison": None,
            "baselines": baselines,
            "few_groups": few_groups(baselines, dataset, chosen.data, chosen.gate.significance),
        }
    )


def beats_baselines(evaluation: Evaluation, gate: GateSettings | None = None) -> Rule:
    return next(rule for rule in decide(evaluation, gate or GateSettings()).rules if rule.name == "beats_baselines")


@pytest.fixture(scope="module")
def scene_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 scenes, each with frames of ten classes."""
    return photograph(tmp_path_factory.mktemp("scenes"), ["abcdefghij"] * 20)


@pytest.mark.parametrize("accuracy", [0.08, 1.0])
def test_two_test_groups_hold_a_first_release_and_name_the_remedy(scene_photos: Path, tmp_path: Path, accuracy: float):
    chosen = settings(scene_photos)
    dataset = ingest(chosen, tmp_path)
    assert dataset.manifest.groups == 20
    evaluation = first_release(dataset, chosen, accuracy)
    verdict = decide(evaluation, chosen.gate)
    rule = beats_baselines(evaluation)
    assert not verdict.promote
    assert (rule.passed, rule.could_fail, rule.result) == (False, False, "too few to tell")
    assert "is significantly" not in rule.reason
    assert "not even a release without errors would be significantly better (p = 0.25, level 0.1)" in rule.reason
    assert "The test split has 2 of 20 groups, and a first release needs 4" in rule.reason
    assert "--set data.test_fraction=0.2 --set data.dataset=" in rule.reason


def test_validation_reports_the_same_before_the_training(scene_photos: Path, tmp_path: Path):
    chosen = settings(scene_photos)
    dataset = ingest(chosen, tmp_path)
    found = find_few_groups(dataset, chosen)
    assert found == first_release(dataset, chosen, 0.5).few_groups
    assert found
    assert (found.test_groups, found.groups, found.needed, found.test_fraction) == (2, 20, 4, 0.2)


CASES = {
    "each scene shows all classes": ["abcdefghij"] * 20,
    "each scene shows one of two classes": ["ab"[scene % 2] for scene in range(24)],
    "a rare class": ["b" if scene % 8 == 0 else "a" for scene in range(60)],
    "each scene shows one of three classes": ["aab"[scene % 3] for scene in range(16)],
    "one hundred scenes of three classes": ["a" if scene % 5 else "bc" for scene in range(100)],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("labels", "significance"), [*zip(CASES.values(), (0.1, 0.02, 0.1, 0.02, 0.02), strict=True)], ids=CASES
)
def test_the_named_fraction_is_enough(tmp_path: Path, labels: list[str], significance: float):
    """The remedy is followed to its end: ingest again, and ask again."""
    source = photograph(tmp_path / "source", labels)
    chosen = of_run(settings(source, test_fraction=0.05).model_dump() | {"gate": {"significance": significance}})
    found = find_few_groups(ingest(chosen, tmp_path), chosen)
    assert found, "the case is too easy"
    if found.test_fraction is None:
        assert found.sentence().endswith("trivial baselines; add images of other groups.")
        return
    words = found.sentence().rstrip(".").split()
    data = dict(word.removeprefix("data.").split("=") for word in words if word.startswith("data."))
    remedied = of_run(chosen.model_dump() | {"data": chosen.data.model_dump() | data})
    dataset = ingest(remedied, tmp_path)
    assert find_few_groups(dataset, remedied) is None
    assert beats_baselines(first_release(dataset, remedied, 1.0)).passed


def test_a_source_that_names_the_test_images_gets_other_advice(tmp_path: Path):
    photograph(tmp_path / "source" / "train", ["ab"] * 9)
    (tmp_path / "source" / "test").mkdir()
    for label in "ab":
        (tmp_path / "source" / "test" / label).mkdir()
        for path in (tmp_path / "source" / "train" / label).glob("scene00_*"):
            path.rename(tmp_path / "source" / "test" / label / path.name)
    chosen = settings(tmp_path / "source")
    found = find_few_groups(ingest(chosen, tmp_path), chosen)
    assert found
    assert found.test_fraction is None
    assert found.sentence() == (
        "The test split has 1 of 9 groups, and a first release needs 4 to be compared with trivial baselines; add "
        "images of other groups to the test split, which the source itself names."
    )


def test_three_test_images_without_groups_are_promoted_with_the_words(tmp_path: Path):
    source = photograph(tmp_path / "source", ["abc"], frames=10)
    chosen = settings(source, group="")
    dataset = ingest(chosen, tmp_path)
    assert dataset.count("test") == 3
    assert find_few_groups(dataset, chosen) is None
    evaluation = first_release(dataset, chosen, 1.0, grouped=False)
    verdict = decide(evaluation, chosen.gate)
    assert verdict.promote
    assert verdict.summary().startswith("promote: too few images to tell for beats_baselines, class_recall")
    assert verdict.reasons[0].startswith("Too few images to tell whether label right 100.00% is better than the most")
    assert verdict.caution == verdict.reasons[0]
    assert "is significantly" not in " ".join(verdict.reasons)


def test_rules_with_an_interval_say_where_no_outcome_could_fail(tmp_path: Path):
    """One test image a class: 0% (0% to 79%) is not called insignificantly below 50%."""
    source = photograph(tmp_path / "source", ["abc"], frames=10)
    chosen = settings(source, group="")
    evaluation = first_release(ingest(chosen, tmp_path), chosen, 0.0, grouped=False)
    rules = {rule.name: rule for rule in decide(evaluation, chosen.gate).rules}
    assert rules["class_recall"].result == "too few to tell"
    assert rules["class_recall"].reason == (
        "Too few images to tell whether label right is below 50% for a class; the worst is a with 0.00% (0.00% to "
        "79.35%)."
    )
    strict = decide(evaluation, GateSettings(false_reject_ceiling=0.6))
    rule = next(rule for rule in strict.rules if rule.name == "false_rejects")
    assert (rule.passed, rule.result) == (True, "too few to tell")
    assert rule.reason.startswith(
        "Too few images to tell whether more than 60% of known images are called unknown: 0.00%"
    )


def test_classes_that_could_fail_are_told_from_those_that_could_not(tmp_path: Path):
    source = photograph(tmp_path / "source", ["ab"] * 5 + ["a"] * 40)
    chosen = settings(source, group="", test_fraction=0.15)
    evaluation = first_release(ingest(chosen, tmp_path), chosen, 1.0, grouped=False)
    reason = next(rule for rule in decide(evaluation, chosen.gate).rules if rule.name == "class_recall").reason
    assert reason.startswith("Label right is significantly below 50% for no class; the worst is b with 100.00% ")
    assert reason.endswith("Too few images to tell for b.")


@pytest.mark.slow
def test_enough_groups_are_compared_as_before(tmp_path: Path):
    source = photograph(tmp_path / "source", ["abcdefghij"] * 20)
    chosen = settings(source, test_fraction=0.4)
    dataset = ingest(chosen, tmp_path)
    assert find_few_groups(dataset, chosen) is None
    good, bad = (beats_baselines(first_release(dataset, chosen, accuracy)) for accuracy in (0.95, 0.05))
    assert (good.passed, good.result) == (True, "passed")
    assert "Label right " in good.reason
    assert "is significantly better than the most common class" in good.reason
    assert (bad.passed, bad.result) == (False, "failed")
    assert "is not significantly better than the most common class" in bad.reason


def test_a_person_may_do_without_the_baselines(scene_photos: Path, tmp_path: Path):
    chosen = settings(scene_photos)
    evaluation = first_release(ingest(chosen, tmp_path), chosen, 1.0)
    assert beats_baselines(evaluation).setting == "gate.beat_baseline=false"
    rule = beats_baselines(evaluation, GateSettings(beat_baseline=False))
    assert (rule.passed, rule.could_fail) == (True, False)
    assert rule.reason.startswith("Too few groups of images to tell")


def test_sentence_without_a_fraction_names_the_groups():
    few = FewGroups(test_groups=1, groups=5, needed=4, dataset="d", test_fraction=None, is_named_by_source=False)
    assert few.sentence().startswith("The test split has 1 of 5 groups, and a first release needs 4 to be compared")
