import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evernear.common.disk import sha256_file
from evernear.common.store import open_store
from evernear.data.ingest import ingest_source
from evernear.data.manifest import SPLITS, ledger_key
from evernear.data.shards import Dataset
from evernear.data.writer import shard_key
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import DESCRIPTION_FILE, Embeddings, EmbeddingsDescription
from evernear.errors import IntegrityError
from evernear.evaluation import evaluate
from evernear.evaluation.evaluate import (
    AnchorEvaluation,
    Evaluation,
    ReleasedSystem,
    UnavailableSystem,
    count_leakage,
    evaluate_systems,
)
from evernear.evaluation.gate import decide
from evernear.evaluation.measure import measure
from evernear.evaluation.open_set import OpenSet
from evernear.evaluation.probe import assess
from evernear.evaluation.recognizer import Recognizer
from evernear.evaluation.statistics import Proportion
from evernear.evaluation.verdict import Rule
from evernear.index.build import build_index
from evernear.settings import ClassSettings, DataSettings, GateSettings, IndexSettings
from tests.open_sets import draw_of
from tests.releases import System

LENIENT = GateSettings(accuracy_floor=0.5, beat_baseline=False)
"""The small test network is less accurate than a production network."""
NEAR, FAR = (np.linspace(start, start + 1, 40, dtype=np.float32) for start in (0, 0.8))
PROBED = assess([draw_of(NEAR, FAR)], IndexSettings()).model_copy(update={"held_out": ("3", "8")})


@pytest.fixture(scope="module")
def full(system: System) -> Recognizer:
    return Recognizer.open(system.network_dir, system.index_dir, "v1")


@pytest.fixture(scope="module")
def embeddings(system: System, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("embeddings")
    embed_dataset(system.network_dir, system.dataset, directory)
    return directory


def indexed(system: System, embeddings: Path, directory: Path, exclude: frozenset[str] = frozenset()) -> Recognizer:
    build_index(Embeddings.open(embeddings), system.dataset.labels, IndexSettings(), directory, exclude)
    return Recognizer.open(system.network_dir, directory)


@pytest.fixture(scope="module")
def collapsed(system: System, embeddings: Path, tmp_path_factory: pytest.TempPathFactory) -> Recognizer:
    return indexed(system, embeddings, tmp_path_factory.mktemp("index"), frozenset({"7"}))


def test_evaluation_survives_a_round_trip(system: System, full: Recognizer, collapsed: Recognizer, tmp_path):
    evaluation = evaluate_systems(collapsed, ReleasedSystem(full, system.dataset), system.dataset, PROBED)
    evaluation.write(tmp_path)
    loaded = Evaluation.open(tmp_path)
    assert loaded.model_dump() == evaluation.model_dump()
    assert decide(loaded, LENIENT) == decide(evaluation, LENIENT)


def full_recall(evaluation: Evaluation) -> dict[str, Proportion]:
    assert evaluation.anchor is not None
    assert evaluation.anchor.measurement is not None
    return evaluation.anchor.measurement.class_recall


def test_anchor_is_measured_on_the_same_queries_and_survives_a_round_trip(
    system: System, full: Recognizer, collapsed: Recognizer, tmp_path: Path
):
    release = ReleasedSystem(full, system.dataset)
    evaluation = evaluate_systems(
        collapsed, ReleasedSystem(collapsed, system.dataset), system.dataset, PROBED, anchor=release
    )
    assert evaluation.anchor is not None
    assert evaluation.anchor.name == "v1"
    assert evaluation.anchor.measurement is not None
    assert evaluation.anchor.measurement.queries_sha256 == evaluation.candidate.queries_sha256
    assert evaluation.anchor.test_overlap == 1.0
    evaluation.write(tmp_path)
    loaded = Evaluation.open(tmp_path)
    assert loaded.model_dump() == evaluation.model_dump()
    verdict = decide(loaded, LENIENT)
    assert verdict.anchor is not None
    assert verdict.anchor.version == "v1"
    reasons = {rule.name: rule.reason for rule in verdict.rules}
    shared = sum(recall.total for label, recall in full_recall(loaded).items() if label != "7")
    assert f"net losses on {shared} test images" in reasons["no_worse_than_anchor"], (
        "the candidate does not know class 7"
    )


def test_anchor_that_cannot_be_measured_is_reported(system: System, full: Recognizer):
    def measured(anchor: ReleasedSystem | UnavailableSystem) -> AnchorEvaluation:
        champion = ReleasedSystem(full, system.dataset)
        evaluation = evaluate_systems(full, champion, system.dataset, PROBED, anchor=anchor)
        assert evaluation.anchor is not None
        assert evaluation.anchor.measurement is None
        return evaluation.anchor

    assert measured(UnavailableSystem("v0", "It is damaged.")).fault == "It is damaged."
    assert "not in the store" in measured(ReleasedSystem(full)).fault
    assert measured(ReleasedSystem(full, fault="Its manifest is damaged.")).fault == "Its manifest is damaged."
    in_color = full.preprocessing.model_copy(update={"height_px": 8, "width_px": 8, "channels": 3})
    small = dataclasses.replace(full, preprocessing=in_color)
    assert "takes images of (8, 8, 3)" in measured(ReleasedSystem(small, system.dataset)).difference


@pytest.fixture
def saved(system: System, full: Recognizer, collapsed: Recognizer, tmp_path) -> Path:
    evaluate_systems(collapsed, ReleasedSystem(full), system.dataset, PROBED).write(tmp_path)
    return tmp_path


@pytest.mark.parametrize("content", [None, b"", b"{}", b"PK\x03\x04 no archive"])
def test_invalid_evaluation_does_not_load(saved: Path, content):
    (saved / "evaluation.json").unlink()
    if content is not None:
        (saved / "evaluation.json").write_bytes(content)
    with pytest.raises(IntegrityError, match="run the evaluate step again"):
        Evaluation.open(saved)


def test_nan_metric_does_not_load(saved: Path):
    tree = json.loads((saved / "evaluation.json").read_text())
    tree["candidate"]["accuracy"]["low"] = math.nan
    (saved / "evaluation.json").write_text(json.dumps(tree))
    with pytest.raises(IntegrityError, match="not a valid evaluation: candidate"):
        Evaluation.open(saved)


def test_metrics_are_flat_finite_numbers(system: System, full: Recognizer, collapsed: Recognizer):
    alone = evaluate_systems(full, None, system.dataset, OpenSet(held_out=())).metrics()
    paired = evaluate_systems(collapsed, ReleasedSystem(full), system.dataset, PROBED).metrics()
    assert set(alone) < set(paired)
    assert {"champion_accuracy", "regressions", "p_worse", "open_set_auroc"} <= set(paired) - set(alone)
    for metrics in (alone, paired):
        assert all(type(value) is float and math.isfinite(value) for value in metrics.values())


def test_first_release_needs_no_champion(system: System, full: Recognizer):
    verdict = decide(evaluate_systems(full, None, system.dataset, PROBED), LENIENT)
    assert verdict.promote
    assert verdict.champion is None
    assert any("no champion yet" in reason for reason in verdict.reasons)


def test_champion_passes_against_itself(system: System, full: Recognizer):
    assert decide(evaluate_systems(full, ReleasedSystem(full, system.dataset), system.dataset, PROBED), LENIENT).promote


def test_leakage_includes_the_training_images_of_the_network(system: System, full: Recognizer):
    """The candidate's network was trained on another snapshot, whose train split contains these
    test images."""

    shards = tuple(shard.model_copy(update={"split": "train"}) for shard in system.dataset.shards("test"))
    manifest = system.dataset.manifest.model_copy(update={"shards": shards})
    trained_on = Dataset(manifest, open_store(manifest.store_uri))
    champion = ReleasedSystem(full, system.dataset)
    evaluation = evaluate_systems(full, champion, system.dataset, PROBED, trained_on)
    assert evaluation.leakage == {"train": system.dataset.count("test"), "gallery": 0, "query": 0}
    assert "test_images_unseen" in {rule.name for rule in decide(evaluation, LENIENT).rules if not rule.passed}


def test_lost_shard_of_an_earlier_snapshot_does_not_hold_the_candidate(
    system: System, full: Recognizer, tmp_path: Path
):
    """The ledger of the snapshot knows the images of the shard."""
    store, manifest = open_store(tmp_path.as_uri()), system.dataset.manifest
    for sha256 in (manifest.ledger_sha256, *manifest.ledger_changes):
        store.put(ledger_key(manifest.name, sha256), system.dataset.store.get(ledger_key(manifest.name, sha256)))
    earlier = Dataset(manifest.model_copy(update={"created": "", "problem_counts": {"x": 1}}), store)
    evaluation = evaluate_systems(full, ReleasedSystem(full, earlier), system.dataset, PROBED, earlier)
    assert evaluation.leakage == evaluation.champion_leakage == {"train": 0, "gallery": 0, "query": 0}
    assert evaluation.champion_test_overlap == 1.0


@pytest.mark.parametrize("damage", [None, b"", b"other"])
def test_unreadable_earlier_snapshot_holds_the_candidate(
    system: System, full: Recognizer, tmp_path: Path, damage: bytes | None
):
    """A shard of the champion's snapshot, on which the network was trained as well, is lost or
    damaged, and the snapshot's ledger is lost."""
    store = open_store(tmp_path.as_uri())
    shard = system.dataset.manifest.shards[0]
    if damage is not None:
        store.put(shard_key(system.dataset.manifest.name, shard.sha256), damage)
    earlier = Dataset(system.dataset.manifest.model_copy(update={"created": "", "problem_counts": {"x": 1}}), store)
    evaluation = evaluate_systems(full, ReleasedSystem(full, earlier), system.dataset, PROBED, earlier)
    assert (evaluation.leakage, evaluation.champion_leakage) == ({}, None)
    evaluation.write(tmp_path / "evaluation")
    verdict = decide(Evaluation.open(tmp_path / "evaluation"), LENIENT)
    failed = {rule.name: rule.reason for rule in verdict.rules if not rule.passed}
    assert set(failed) == {"test_images_unseen", "same_test_set"}
    for reason in failed.values():
        assert "The shard" in reason
        assert "run `evernear store check --repair`" in reason


def test_unreadable_manifest_of_the_champion_holds_the_candidate(system: System, full: Recognizer):
    fault = "x.json is not a valid manifest; run `evernear store check --repair`."
    champion = ReleasedSystem(full, fault=fault)
    verdict = decide(evaluate_systems(full, champion, system.dataset, PROBED), LENIENT)
    (failed,) = [rule.reason for rule in verdict.rules if not rule.passed]
    assert fault in failed


def test_collapsed_class_fails_the_gate(system: System, full: Recognizer, collapsed: Recognizer):
    verdict = decide(evaluate_systems(collapsed, ReleasedSystem(full, system.dataset), system.dataset, PROBED), LENIENT)
    failed = {rule.name: rule.reason for rule in verdict.rules if not rule.passed}
    assert {"classes_kept", "class_recall", "no_worse"} == set(failed)
    assert failed["classes_kept"].endswith("classes of the champion: 7.")
    assert "7 (0.0%)" in failed["class_recall"]
    assert not verdict.promote
    # In the opposite direction a class is gained, and the 7s do not fail the gate.
    lenient = LENIENT.model_copy(update={"significance": 0.001})
    assert decide(
        evaluate_systems(full, ReleasedSystem(collapsed, system.dataset), system.dataset, PROBED), lenient
    ).promote


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


def reason_of(evaluation: Evaluation, name: str, settings: GateSettings) -> str:
    (reason,) = (rule.reason for rule in decide(evaluation, settings).rules if rule.name == name and not rule.passed)
    return reason


def test_predictions_at_chance_mean_failed_training_where_pixels_do_better(system: System, embeddings: Path, tmp_path):
    """The index answers at random, but the labels match the images."""
    with_shuffled_labels(embeddings, tmp_path)
    candidate = indexed(system, tmp_path, tmp_path / "index")
    evaluation = evaluate_systems(candidate, None, system.dataset, PROBED)
    reason = reason_of(evaluation, "beats_baselines", GateSettings())
    assert "is not significantly better than the most common class" in reason
    assert reason.endswith("the training failed.")


def test_labels_are_called_shuffled_where_pixels_are_at_chance_too(system: System, full: Recognizer, tmp_path):
    rng = np.random.default_rng(0)
    for block in system.dataset.blocks("test"):
        for number, (image, label) in enumerate(zip(block.images, rng.permutation(block.labels), strict=True)):
            folder = tmp_path / "images" / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[:, :, 0]).save(folder / f"{number}.png")
    settings = DataSettings(source=f"folder:{tmp_path / 'images'}", test_fraction=0.6, gallery_fraction=0.3)
    store = (tmp_path / "store").as_uri()
    shuffled = Dataset(ingest_source(settings, store), open_store(store))
    evaluation = evaluate_systems(full, None, shuffled, PROBED)
    reason = reason_of(evaluation, "beats_baselines", GateSettings())
    assert "as if they were shuffled, or there are too few images to learn from" in reason


def test_a_weak_network_is_not_blamed_on_the_labels(system: System, collapsed: Recognizer):
    """It is worse than pixels, but far better than chance."""
    evaluation = evaluate_systems(collapsed, None, system.dataset, PROBED)
    reason = reason_of(evaluation, "beats_baselines", GateSettings())
    assert "the nearest gallery image by 8x8 pixels" in reason
    assert "labels" not in reason


def test_systems_are_measured_on_the_same_queries(system: System, full: Recognizer, collapsed: Recognizer):
    evaluation = evaluate_systems(collapsed, ReleasedSystem(full), system.dataset, PROBED)
    assert evaluation.champion == measure(full, system.dataset)[0]
    assert evaluation.champion.queries_sha256 == evaluation.candidate.queries_sha256
    assert evaluation.candidate.name == ""
    assert evaluation.champion.name == "v1"


def test_retained_test_images_with_another_dataset(
    system: System, full: Recognizer, tmp_path_factory: pytest.TempPathFactory
):
    def retained(champion_dataset: Dataset) -> float | None:
        return evaluate_systems(
            full, ReleasedSystem(full, champion_dataset), system.dataset, PROBED
        ).champion_test_overlap

    def other(settings: DataSettings) -> Dataset:
        store = tmp_path_factory.mktemp("store").as_uri()
        return Dataset(ingest_source(settings, store), open_store(store))

    source = DataSettings(source=system.dataset.manifest.source, gallery_fraction=0.2, query_fraction=0.1)
    assert retained(system.dataset) == 1.0
    assert retained(other(source.model_copy(update={"size_px": 16}))) == 1.0, "the same images at another size"
    fewer = retained(other(source.model_copy(update={"test_fraction": 0.2})))
    assert fewer is not None
    assert 0.3 < fewer < 0.7, "half of its test images are in the train split"
    without = evaluate_systems(full, ReleasedSystem(full), system.dataset, PROBED)
    assert without.champion_test_overlap is None
    assert "same_test_set" in {rule.name for rule in decide(without, LENIENT).rules if not rule.passed}


@pytest.fixture
def reviewed_and_own(system: System, tmp_path: Path) -> Path:
    """Digits as files: the names of half of them show that they came by review."""
    for block in system.dataset.blocks("test"):
        for image, label, digest in zip(block.images, block.labels, block.digests, strict=True):
            name = digest.tobytes().hex()[:16]
            path = tmp_path / "images" / str(label) / f"{'review-' if digest[0] % 2 else 'own-'}{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[:, :, 0]).save(path)
    return tmp_path / "images"


def test_reviewed_images_that_left_the_test_split_are_no_lost_test_images(
    reviewed_and_own: Path, full: Recognizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The champion was tested on images that came by review."""
    settings = DataSettings(source=f"folder:{reviewed_and_own}", test_fraction=0.5, gallery_fraction=0.3)
    store = (tmp_path / "store").as_uri()
    with monkeypatch.context() as patch:
        for module in ("splits", "reviewed"):
            patch.setattr(f"evernear.data.{module}.is_reviewed", lambda _: False)
        earlier = Dataset(ingest_source(settings, store), open_store(store))
    champion = ReleasedSystem(full, earlier)

    def same_test_set() -> tuple[Evaluation, Rule]:
        dataset = Dataset(ingest_source(settings, store), open_store(store))
        evaluation = evaluate_systems(full, champion, dataset, PROBED, anchor=champion)
        return evaluation, next(rule for rule in decide(evaluation, LENIENT).rules if rule.name == "same_test_set")

    evaluation, rule = same_test_set()
    assert 0.3 < evaluation.reviewed_left_out["test"] / earlier.count("test") < 0.7
    assert evaluation.candidate.accuracy.total == earlier.count("test") - evaluation.reviewed_left_out["test"]
    assert evaluation.champion_test_overlap == 1.0
    assert evaluation.anchor is not None
    assert evaluation.anchor.test_overlap == 1.0
    assert rule.passed
    assert rule.reason.endswith("Images that came by review do not count.")

    for path in sorted(reviewed_and_own.rglob("own-*"))[::3]:
        path.unlink()
    evaluation, rule = same_test_set()
    assert evaluation.champion_test_overlap == pytest.approx(2 / 3, abs=0.15), "the person's own images count"
    assert not rule.passed


def test_renamed_class_is_compared_under_its_new_name(
    system: System, embeddings: Path, full: Recognizer, tmp_path: Path
):
    labels = tuple("seven" if label == "7" else label for label in system.dataset.labels)
    manifest = system.dataset.manifest
    shards = tuple(
        shard.model_copy(update={"label_counts": {labels[int(k)]: n for k, n in shard.label_counts.items()}})
        for shard in manifest.shards
    )
    renamed = Dataset(manifest.model_copy(update={"labels": labels, "shards": shards}), open_store(manifest.store_uri))
    build_index(Embeddings.open(embeddings), labels, IndexSettings(), tmp_path)
    candidate = Recognizer.open(system.network_dir, tmp_path)
    champion = ReleasedSystem(full, system.dataset)
    unchanged = evaluate_systems(candidate, champion, renamed, PROBED)
    failed = {rule.name for rule in decide(unchanged, LENIENT).rules if not rule.passed}
    assert "classes_kept" in failed
    champion = champion._replace(classes=ClassSettings(renamed={"7": "seven"}))
    evaluation = evaluate_systems(candidate, champion, renamed, PROBED)
    assert evaluation.comparison is not None
    assert evaluation.comparison.overall.regressions == evaluation.comparison.overall.improvements == 0
    assert evaluation.champion is not None
    assert evaluation.champion.class_recall == evaluation.candidate.class_recall
    verdict = decide(evaluation, LENIENT)
    assert verdict.promote, verdict.reasons
    assert any("Renamed: 7 to seven." in reason for reason in verdict.reasons)


def test_retired_class_is_left_out_of_the_comparison(system: System, full: Recognizer, tmp_path: Path):
    images = tmp_path / "images"
    for split in SPLITS:
        for block in system.dataset.blocks(split):
            for image, label, digest in zip(block.images, block.labels, block.digests, strict=True):
                if label != 7:
                    path = images / split / str(label) / f"{bytes(digest).hex()[:16]}.png"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(image[:, :, 0]).save(path)
    store = (tmp_path / "store").as_uri()
    dataset = Dataset(ingest_source(DataSettings(source=f"folder:{images}"), store), open_store(store))
    embed_dataset(system.network_dir, dataset, tmp_path / "embeddings")
    build_index(Embeddings.open(tmp_path / "embeddings"), dataset.labels, IndexSettings(), tmp_path / "index")
    candidate = Recognizer.open(system.network_dir, tmp_path / "index")
    champion = ReleasedSystem(full, system.dataset)
    unchanged = evaluate_systems(candidate, champion, dataset, PROBED)
    assert any("lacks classes of the champion: 7." in reason for reason in decide(unchanged, LENIENT).reasons)
    champion = champion._replace(classes=ClassSettings(retired=("7",)))
    evaluation = evaluate_systems(candidate, champion, dataset, PROBED)
    assert evaluation.champion_test_overlap == 1
    assert evaluation.champion is not None
    assert "7" not in evaluation.champion.known_labels
    verdict = decide(evaluation, LENIENT)
    assert verdict.promote, verdict.reasons
    assert any("Retired on purpose: 7." in reason for reason in verdict.reasons)


def with_test_images_in(dataset: Dataset, split: str) -> Dataset:
    """The same dataset with its test shards added to ``split``."""
    manifest = dataset.manifest
    leaked = tuple(shard.model_copy(update={"split": split}) for shard in manifest.shards if shard.split == "test")
    return Dataset(manifest.model_copy(update={"shards": (*manifest.shards, *leaked)}), open_store(manifest.store_uri))


def test_ingested_dataset_has_no_leakage(system: System):
    assert count_leakage(system.dataset, system.dataset) == {"train": 0, "gallery": 0, "query": 0}


@pytest.mark.parametrize("split", ["train", "gallery", "query"])
@pytest.mark.parametrize("block_size", [1_000_000, 50])
def test_injected_test_images_are_detected(system: System, monkeypatch, split, block_size):
    monkeypatch.setattr(evaluate, "BLOCK_SIZE", block_size)
    counts = count_leakage(system.dataset, with_test_images_in(system.dataset, split))
    assert counts == {"train": 0, "gallery": 0, "query": 0} | {split: system.dataset.count("test")}


def test_single_leaked_image_in_a_later_snapshot_is_detected(system: System, monkeypatch):
    """An image that trained an earlier release can become a test image only if the splits
    change."""
    train = next(iter(system.dataset.blocks("train"))).digests
    blocks = Dataset.shard_blocks

    def moved(self: Dataset, shard, block_size=4096):
        for block in blocks(self, shard, block_size):
            if shard.split == "test" and self is later:
                block.digests[-1] = train[17]
            yield block

    later = Dataset(system.dataset.manifest, open_store(system.dataset.manifest.store_uri))
    monkeypatch.setattr(Dataset, "shard_blocks", moved)
    assert count_leakage(later, system.dataset) == {"train": 1, "gallery": 0, "query": 0}
    assert np.any(train[17])
