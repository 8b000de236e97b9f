import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evernear.common.disk import sha256_file
from evernear.common.store import open_store
from evernear.data.manifest import SPLITS
from evernear.data.shards import Dataset
from evernear.data.tables import table_key
from evernear.data.writer import shard_key
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import DESCRIPTION_FILE, Embeddings, EmbeddingsDescription
from evernear.errors import IntegrityError
from evernear.evaluation import evaluate
from evernear.evaluation.assess import assess
from evernear.evaluation.evaluate import (
    AnchorEvaluation,
    Evaluation,
    ReleasedSystem,
    UnavailableSystem,
    count_leakage,
    evaluate_systems,
)
from evernear.evaluation.gate import decide
from evernear.evaluation.open_set import OpenSet
from evernear.evaluation.recognizer import Recognizer
from evernear.evaluation.verdict import Rule
from evernear.index.build import build_index
from evernear.settings import ClassSettings, GateSettings, IndexSettings
from tests.open_sets import draw_of
from tests.releases import System
from tests.small_ingest import dataset_of, opened

LENIENT = GateSettings(accuracy_floor=0.5, beat_baseline=False)
"""The small test network is less accurate than a production network."""
NEAR, FAR = (np.linspace(start, start + 1, 40, dtype=np.float32) for start in (0, 0.8))
PROBED = assess([draw_of(NEAR, FAR)], IndexSettings()).model_copy(update={"held_out": ("3", "8")})


@pytest.fixture(scope="module")
def full(system: System) -> Recognizer:
    return Recognizer.open(system.network_dir, system.index_dir, "v1")


@pytest.fixture(scope="module")
def embeddings_dir(system: System, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("embeddings")
    embed_dataset(system.network_dir, system.dataset, directory)
    return directory


def indexed(system: System, embeddings: Path, directory: Path, exclude: frozenset[str] = frozenset()) -> Recognizer:
    build_index(Embeddings.open(embeddings), system.dataset.labels, IndexSettings(), directory, exclude)
    return Recognizer.open(system.network_dir, directory)


@pytest.fixture(scope="module")
def collapsed(system: System, embeddings_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Recognizer:
    return indexed(system, embeddings_dir, tmp_path_factory.mktemp("index"), frozenset({"7"}))


def test_anchor_is_measured_on_the_same_queries_and_survives_a_round_trip(system, full, collapsed, tmp_path):
    release = ReleasedSystem(full, system.dataset)
    evaluation = evaluate_systems(
        collapsed, ReleasedSystem(collapsed, system.dataset), system.dataset, PROBED, anchor=release
    )
    assert evaluation.anchor.name == "v1"
    assert evaluation.anchor.measurement.queries_sha256 == evaluation.candidate.queries_sha256
    assert evaluation.anchor.test_overlap == 1.0
    evaluation.write(tmp_path)
    loaded = Evaluation.open(tmp_path)
    assert loaded.model_dump() == evaluation.model_dump()
    verdict = decide(loaded, LENIENT)
    assert verdict.anchor.version == "v1"
    reasons = {rule.name: rule.reason for rule in verdict.rules}
    shared = sum(recall.total for label, recall in loaded.anchor.measurement.class_label_right.items() if label != "7")
    assert f"net losses on {shared} test images" in reasons["no_worse_than_anchor"], (
        "the candidate does not know class 7"
    )


def test_anchor_that_cannot_be_measured_is_reported(system: System, full: Recognizer):
    def measured(anchor: ReleasedSystem | UnavailableSystem) -> AnchorEvaluation:
        champion = ReleasedSystem(full, system.dataset)
        evaluation = evaluate_systems(full, champion, system.dataset, PROBED, anchor=anchor)
        assert evaluation.anchor.measurement is None
        return evaluation.anchor

    assert measured(UnavailableSystem("v0", "It is damaged.")).fault == "It is damaged."
    assert "not in the store" in measured(ReleasedSystem(full)).fault
    assert measured(ReleasedSystem(full, fault="Its manifest is damaged.")).fault == "Its manifest is damaged."
    in_color = full.preprocessing.model_copy(update={"height_px": 8, "width_px": 8, "channels": 3})
    small = dataclasses.replace(full, preprocessing=in_color)
    assert "takes images of (8, 8, 3)" in measured(ReleasedSystem(small, system.dataset)).difference


def failed(evaluation: Evaluation) -> dict[str, str]:
    return {rule.name: rule.reason for rule in decide(evaluation, LENIENT).rules if not rule.passed}


@pytest.fixture
def saved_evaluation(system: System, full: Recognizer, collapsed: Recognizer, tmp_path) -> Path:
    evaluate_systems(collapsed, ReleasedSystem(full), system.dataset, PROBED).write(tmp_path)
    return tmp_path


@pytest.mark.parametrize("content", [None, b"", b"{}", b"PK\x03\x04 no archive"])
def test_invalid_evaluation_does_not_load(saved_evaluation: Path, content):
    (saved_evaluation / "evaluation.json").unlink()
    if content is not None:
        (saved_evaluation / "evaluation.json").write_bytes(content)
    with pytest.raises(IntegrityError, match="run the evaluate step again"):
        Evaluation.open(saved_evaluation)


def test_nan_metric_does_not_load(saved_evaluation: Path):
    tree = json.loads((saved_evaluation / "evaluation.json").read_text())
    tree["candidate"]["label_right"]["low"] = math.nan
    (saved_evaluation / "evaluation.json").write_text(json.dumps(tree))
    with pytest.raises(IntegrityError, match="not a valid evaluation: candidate"):
        Evaluation.open(saved_evaluation)


def test_metrics_are_flat_finite_numbers(system: System, full: Recognizer, collapsed: Recognizer):
    alone = evaluate_systems(full, None, system.dataset, OpenSet(held_out=())).metrics()
    paired = evaluate_systems(collapsed, ReleasedSystem(full), system.dataset, PROBED).metrics()
    assert set(alone) < set(paired)
    assert {"champion_label_right", "regressions", "p_worse", "open_set_auroc"} <= set(paired) - set(alone)
    for metrics in (alone, paired):
        assert all(type(value) is float and math.isfinite(value) for value in metrics.values())


def test_champion_passes_against_itself(system: System, full: Recognizer):
    assert decide(evaluate_systems(full, ReleasedSystem(full, system.dataset), system.dataset, PROBED), LENIENT).promote


def test_leakage_includes_the_training_images_of_the_network(system: System, full: Recognizer):
    """The network was trained on another snapshot, whose train split contains these test images."""

    shards = tuple(shard.model_copy(update={"split": "train"}) for shard in system.dataset.shards("test"))
    manifest = system.dataset.manifest.model_copy(update={"shards": shards})
    trained_on = opened(manifest)
    champion = ReleasedSystem(full, system.dataset)
    evaluation = evaluate_systems(full, champion, system.dataset, PROBED, trained_on)
    assert evaluation.leakage == {"train": system.dataset.count("test"), "gallery": 0, "query": 0}
    assert "test_images_unseen" in failed(evaluation)


def test_lost_shard_of_an_earlier_snapshot_does_not_hold_the_candidate(system: System, full: Recognizer, tmp_path):
    """The tables of the snapshot know the images of the shard."""
    store, manifest = open_store(tmp_path.as_uri()), system.dataset.manifest
    for table, partitions in manifest.tables.items():
        for partition in partitions:
            key = table_key(manifest.name, table, partition.sha256)
            store.put(key, system.dataset.store.get(key))
    earlier = Dataset(manifest.model_copy(update={"created": "", "problem_counts": {"x": 1}}), store)
    evaluation = evaluate_systems(full, ReleasedSystem(full, earlier), system.dataset, PROBED, earlier)
    assert evaluation.leakage == evaluation.champion_leakage == {"train": 0, "gallery": 0, "query": 0}
    assert evaluation.champion_test_overlap == 1.0


@pytest.mark.parametrize("damage", [None, b"", b"other"])
def test_unreadable_earlier_snapshot_holds_the_candidate(system, full, tmp_path, damage):
    """The champion's snapshot, on which the network was trained, lost a shard and its tables."""
    store = open_store(tmp_path.as_uri())
    shard = system.dataset.manifest.shards[0]
    if damage is not None:
        store.put(shard_key(system.dataset.manifest.name, shard.sha256), damage)
    earlier = Dataset(system.dataset.manifest.model_copy(update={"created": "", "problem_counts": {"x": 1}}), store)
    evaluation = evaluate_systems(full, ReleasedSystem(full, earlier), system.dataset, PROBED, earlier)
    assert (evaluation.leakage, evaluation.champion_leakage) == ({}, None)
    evaluation.write(tmp_path / "evaluation")
    reasons = failed(Evaluation.open(tmp_path / "evaluation"))
    assert set(reasons) == {"test_images_unseen", "same_test_set"}
    for reason in reasons.values():
        assert "The shard" in reason
        assert "run `evernear store check --repair`" in reason


def test_unreadable_manifest_of_the_champion_holds_the_candidate(system: System, full: Recognizer):
    fault = "x.json is not a valid manifest; run `evernear store check --repair`."
    champion = ReleasedSystem(full, fault=fault)
    (reason,) = failed(evaluate_systems(full, champion, system.dataset, PROBED)).values()
    assert fault in reason


def test_collapsed_class_fails_the_gate(system: System, full: Recognizer, collapsed: Recognizer):
    reasons = failed(evaluate_systems(collapsed, ReleasedSystem(full, system.dataset), system.dataset, PROBED))
    assert {"classes_kept", "class_recall", "no_worse"} == set(reasons)
    assert reasons["classes_kept"].endswith("classes of the champion: 7.")
    assert "7 (0.0%)" in reasons["class_recall"]
    # In the opposite direction a class is gained, and the 7s do not fail the gate.
    lenient = LENIENT.model_copy(update={"significance": 0.001})
    assert decide(
        evaluate_systems(full, ReleasedSystem(collapsed, system.dataset), system.dataset, PROBED), lenient
    ).promote


def images_of(dataset: Dataset, split: str) -> Iterator[tuple[np.ndarray, int, str]]:
    """Each image with its label and 16 digits of its digest."""
    for block in dataset.blocks(split):
        for image, label, digest in zip(block.images, block.labels, block.digests, strict=True):
            yield image, label, digest.tobytes().hex()[:16]


def save_image(image: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image[:, :, 0]).save(path)


def with_shuffled_labels(embeddings: Path, directory: Path) -> None:
    """Write a copy of ``embeddings`` whose labels are permuted."""
    rng = np.random.default_rng(0)
    description = EmbeddingsDescription.model_validate_json((embeddings / DESCRIPTION_FILE).read_bytes())
    shards = []
    for shard in description.shards:
        rows = np.load(embeddings / shard.file)
        rows["label"] = rng.permutation(rows["label"])
        (directory / shard.file).parent.mkdir(parents=True, exist_ok=True)
        np.save(directory / shard.file, rows)
        shards.append(shard.model_copy(update={"sha256": sha256_file(directory / shard.file)}))
    shuffled = description.model_copy(update={"shards": tuple(shards)})
    (directory / DESCRIPTION_FILE).write_text(shuffled.model_dump_json())


def reason_of_baselines(evaluation: Evaluation) -> str:
    (rule,) = (rule for rule in decide(evaluation, GateSettings()).rules if rule.name == "beats_baselines")
    assert not rule.passed
    return rule.reason


def test_predictions_at_chance_mean_failed_training_where_pixels_do_better(
    system: System, embeddings_dir: Path, tmp_path
):
    """The index answers at random, but the labels match the images."""
    with_shuffled_labels(embeddings_dir, tmp_path)
    candidate = indexed(system, tmp_path, tmp_path / "index")
    evaluation = evaluate_systems(candidate, None, system.dataset, PROBED)
    reason = reason_of_baselines(evaluation)
    assert "is not significantly better than the most common class" in reason
    assert reason.endswith("the training failed.")


def test_labels_are_called_shuffled_where_pixels_are_at_chance_too(system: System, full: Recognizer, tmp_path):
    rng = np.random.default_rng(0)
    for image, _, digest in images_of(system.dataset, "test"):
        save_image(image, tmp_path / "images" / str(rng.integers(10)) / f"{digest}.png")
    shuffled = dataset_of(tmp_path / "images", tmp_path / "store", test_fraction=0.6, gallery_fraction=0.3)
    evaluation = evaluate_systems(full, None, shuffled, PROBED)
    reason = reason_of_baselines(evaluation)
    assert "there are too few images to learn from" in reason


def test_a_weak_network_is_not_blamed_on_the_labels(system: System, collapsed: Recognizer):
    """It is worse than pixels, but far better than chance."""
    evaluation = evaluate_systems(collapsed, None, system.dataset, PROBED)
    reason = reason_of_baselines(evaluation)
    assert "the nearest gallery image by 8x8 pixels" in reason
    assert "labels" not in reason


def test_retained_test_images_with_another_dataset(system: System, full: Recognizer, tmp_path: Path):
    def retained(champion_dataset: Dataset) -> float | None:
        return evaluate_systems(
            full, ReleasedSystem(full, champion_dataset), system.dataset, PROBED
        ).champion_test_overlap

    source, fractions = system.dataset.manifest.source, {"gallery_fraction": 0.2, "query_fraction": 0.1}
    assert retained(system.dataset) == 1.0
    larger = dataset_of(source, tmp_path / "larger", size_px=16, **fractions)
    assert retained(larger) == 1.0, "the same images at another size"
    fewer = retained(dataset_of(source, tmp_path / "fewer", test_fraction=0.2, **fractions))
    assert fewer is not None
    assert 0.3 < fewer < 0.7, "half of its test images are in the train split"
    without = evaluate_systems(full, ReleasedSystem(full), system.dataset, PROBED)
    assert without.champion_test_overlap is None
    assert "same_test_set" in failed(without)


@pytest.fixture
def reviewed_and_own(system: System, tmp_path: Path) -> Path:
    """Digits as files: the names of half of them show that they came by review."""
    for image, label, digest in images_of(system.dataset, "test"):
        origin = "review" if int(digest, 16) % 2 else "own"
        save_image(image, tmp_path / "images" / str(label) / f"{origin}-{digest}.png")
    return tmp_path / "images"


def test_reviewed_images_that_left_the_test_split_are_no_lost_test_images(
    reviewed_and_own: Path, full: Recognizer, tmp_path: Path
):
    """The champion was tested on images that came by review."""

    def ingest() -> Dataset:
        return dataset_of(reviewed_and_own, tmp_path / "store", test_fraction=0.5, gallery_fraction=0.3)

    answers = sorted(reviewed_and_own.rglob("review-*"))
    unmarked = [file.rename(file.with_name(file.name.replace("review", "later"))) for file in answers]
    earlier = ingest()
    for file, answer in zip(unmarked, answers, strict=True):
        file.rename(answer)
    champion = ReleasedSystem(full, earlier)

    def same_test_set() -> tuple[Evaluation, Rule]:
        evaluation = evaluate_systems(full, champion, ingest(), PROBED, anchor=champion)
        return evaluation, next(rule for rule in decide(evaluation, LENIENT).rules if rule.name == "same_test_set")

    evaluation, rule = same_test_set()
    assert 0.3 < evaluation.reviewed_left_out["test"] / earlier.count("test") < 0.7
    assert evaluation.candidate.label_right.total == earlier.count("test") - evaluation.reviewed_left_out["test"]
    assert evaluation.champion_test_overlap == 1.0
    assert evaluation.anchor.test_overlap == 1.0
    assert rule.passed
    assert rule.reason.endswith("Images that came by review do not count.")

    for path in sorted(reviewed_and_own.rglob("own-*"))[::3]:
        path.unlink()
    evaluation, rule = same_test_set()
    assert evaluation.champion_test_overlap == pytest.approx(2 / 3, abs=0.15), "the person's own images count"
    assert not rule.passed


def test_renamed_class_is_compared_under_its_new_name(system: System, embeddings_dir: Path, full: Recognizer, tmp_path):
    labels = tuple("seven" if label == "7" else label for label in system.dataset.labels)
    manifest = system.dataset.manifest
    shards = tuple(
        shard.model_copy(update={"label_counts": {labels[int(k)]: n for k, n in shard.label_counts.items()}})
        for shard in manifest.shards
    )
    renamed = opened(manifest.model_copy(update={"labels": labels, "shards": shards}))
    build_index(Embeddings.open(embeddings_dir), labels, IndexSettings(), tmp_path)
    candidate = Recognizer.open(system.network_dir, tmp_path)
    champion = ReleasedSystem(full, system.dataset)
    unchanged = evaluate_systems(candidate, champion, renamed, PROBED)
    assert "classes_kept" in failed(unchanged)
    champion = champion._replace(classes=ClassSettings(renamed={"7": "seven"}))
    evaluation = evaluate_systems(candidate, champion, renamed, PROBED)
    assert evaluation.comparison.overall.regressions == evaluation.comparison.overall.improvements == 0
    assert evaluation.champion.class_label_right == evaluation.candidate.class_label_right
    verdict = decide(evaluation, LENIENT)
    assert verdict.promote, verdict.reasons
    assert any("Renamed: 7 to seven." in reason for reason in verdict.reasons)


@pytest.mark.slow
def test_retired_class_is_left_out_of_the_comparison(system: System, full: Recognizer, tmp_path: Path):
    images = tmp_path / "images"
    for split in SPLITS:
        for image, label, digest in images_of(system.dataset, split):
            if label != 7:
                save_image(image, images / split / str(label) / f"{digest}.png")
    dataset = dataset_of(images, tmp_path / "store")
    embed_dataset(system.network_dir, dataset, tmp_path / "embeddings")
    build_index(Embeddings.open(tmp_path / "embeddings"), dataset.labels, IndexSettings(), tmp_path / "index")
    candidate = Recognizer.open(system.network_dir, tmp_path / "index")
    champion = ReleasedSystem(full, system.dataset)
    unchanged = evaluate_systems(candidate, champion, dataset, PROBED)
    assert any("lacks classes of the champion: 7." in reason for reason in decide(unchanged, LENIENT).reasons)
    champion = champion._replace(classes=ClassSettings(retired=("7",)))
    evaluation = evaluate_systems(candidate, champion, dataset, PROBED)
    assert evaluation.champion_test_overlap == 1
    assert "7" not in evaluation.champion.known_labels
    verdict = decide(evaluation, LENIENT)
    assert verdict.promote, verdict.reasons
    assert any("Retired on purpose: 7." in reason for reason in verdict.reasons)


def with_test_images_in(dataset: Dataset, split: str) -> Dataset:
    """The same dataset with its test shards added to ``split``."""
    manifest = dataset.manifest
    leaked = tuple(shard.model_copy(update={"split": split}) for shard in manifest.shards if shard.split == "test")
    return opened(manifest.model_copy(update={"shards": (*manifest.shards, *leaked)}))


@pytest.mark.parametrize(("split", "block_size"), [("train", 50), ("gallery", 1_000_000), ("query", 50)])
def test_injected_test_images_are_detected(system: System, monkeypatch, split, block_size):
    monkeypatch.setattr(evaluate, "BLOCK_SIZE", block_size)
    counts = count_leakage(system.dataset, with_test_images_in(system.dataset, split))
    assert counts == {"train": 0, "gallery": 0, "query": 0} | {split: system.dataset.count("test")}


def test_single_leaked_image_in_a_later_snapshot_is_detected(system: System, monkeypatch):
    """A training image can become a test image only if the splits change."""
    train = next(iter(system.dataset.blocks("train"))).digests
    blocks = Dataset.shard_blocks

    def moved(self: Dataset, shard, block_size=4096):
        for block in blocks(self, shard, block_size):
            if shard.split == "test" and self is later:
                block.digests[-1] = train[17]
            yield block

    later = opened(system.dataset.manifest)
    monkeypatch.setattr(Dataset, "shard_blocks", moved)
    assert count_leakage(later, system.dataset) == {"train": 1, "gallery": 0, "query": 0}
    assert np.any(train[17])
