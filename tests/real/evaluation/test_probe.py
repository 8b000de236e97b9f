import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file

from evernear.common.store import open_store
from evernear.embedding.clock import Clock
from evernear.embedding.embed import ExportedEmbedder, embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.embedding.export import export_network
from evernear.embedding.recipe import PROBE_DRAWS, Recipe, recipe_of_probe, with_defaults
from evernear.embedding.train import train_network
from evernear.evaluation import probe as probe_module
from evernear.evaluation.assess import Added, Draw, Sample, assess
from evernear.evaluation.open_set import OpenSet
from evernear.evaluation.probe import (
    AddedVectors,
    OtherImages,
    _ask_added,
    _ask_in_halves,
    choose_held_out,
    choose_opener,
    half_of_scenes,
    probe_open_set,
    with_more_queries,
)
from evernear.evaluation.statistics import auroc_interval, place
from evernear.index.build import build_index
from evernear.index.description import MAX_DISTANCE
from evernear.index.search import Gallery
from evernear.settings import EvaluationSettings, IndexSettings, TrainSettings
from tests.digits import load_digits
from tests.gallery_vectors import NETWORK, MakeEmbeddings, blobs
from tests.open_sets import draw_of
from tests.releases import System
from tests.small_ingest import dataset_of, opened

LABELS = ("zero", "one", "two", "three", "four")
TINY = TrainSettings(epochs=30, min_steps=0, width=4, embedding_dim=16, batch_size=128)


@given(st.lists(st.text(max_size=3), unique=True, max_size=12), st.integers(1, 5), st.integers(1, 5), st.integers(0, 5))
def test_no_class_is_held_out_twice_and_two_remain_for_training(labels, count, draws, seed):
    held_out = choose_held_out(labels, count, draws, seed)
    picked = [label for draw in held_out for label in draw]
    assert set(picked) <= set(labels)
    assert len(picked) == len(set(picked))
    size = max(0, min(count, len(labels) - 2))
    assert [len(draw) for draw in held_out] == [size] * (min(draws, len(labels) // size) if size else 0)
    assert held_out == choose_held_out(labels, count, draws, seed)


@pytest.fixture(scope="module")
def open_set(system: System) -> OpenSet:
    settings = EvaluationSettings(probe_epochs=4)
    return probe_open_set(system.dataset, TINY, settings, IndexSettings(false_accept_rate=0.05))


@pytest.mark.parametrize(
    ("train", "probe_epochs", "expected"),
    [(TrainSettings(), 0, 3), (TrainSettings(epochs=30), 0, 8), (TrainSettings(epochs=30), 2, 2)],
)
def test_probe_trains_a_share_of_the_epochs(system: System, train: TrainSettings, probe_epochs: int, expected: int):
    assert recipe_of_probe(train, system.dataset, probe_epochs).epochs == expected


def test_probe_covers_every_test_image(system: System, open_set: OpenSet):
    counts = system.dataset.manifest.label_counts("test")
    unknown = sum(counts[label] for label in open_set.held_out)
    assert len(open_set.held_out) == 2
    assert (open_set.auroc.unknown, open_set.auroc.known) == (unknown, system.dataset.count("test") - unknown)
    assert (open_set.false_accepts.total, open_set.false_rejects.total) == (unknown, open_set.auroc.known)


def test_unseen_classes_have_larger_distances(open_set: OpenSet):
    assert open_set.auroc.value > 0.7
    assert open_set.separates


def test_known_images_take_precedence(open_set: OpenSet):
    """The small network cannot reject 95% of unseen classes without rejecting many known images."""
    assert open_set.required_reject_rate is not None
    assert open_set.required_reject_rate > 0.05
    assert 0 < open_set.reject_rate <= 0.08
    assert open_set.false_rejects.low <= 0.08
    assert (
        f"Both rates cannot be held: to accept 5% of unseen images (index.false_accept_rate), "
        f"{open_set.required_reject_rate:.0%} of known images would be called unknown. "
        "index.false_reject_rate = 0.05 takes precedence"
    ) in open_set.summary()


NEAR, FAR = np.linspace(0, 1, 200, dtype=np.float32), np.linspace(0.9, 1.9, 200, dtype=np.float32)


def test_both_rates_are_met_if_possible():
    result = assess([draw_of(NEAR, FAR)], IndexSettings(false_accept_rate=0.05, false_reject_rate=0.2))
    assert result.reject_rate == result.required_reject_rate == pytest.approx(0.055, abs=0.01)
    assert result.false_accepts.value <= 0.06
    assert "cannot be held" not in result.summary()
    assert result.threshold is None


@pytest.mark.parametrize("shift", [0.0, -0.5])
def test_unknown_is_disabled_if_distances_do_not_separate(shift: float):
    """Every threshold would reject known images first."""
    result = assess([draw_of(NEAR, NEAR + shift)], IndexSettings())
    assert result.threshold == MAX_DISTANCE
    assert result.reject_rate is None
    assert result.false_rejects.count == 0
    assert result.summary().startswith("Unknown is switched off")


def test_a_threshold_that_accepts_most_unseen_images_is_switched_off():
    """Their distances are significantly larger, but not large enough for the known images."""
    rng = np.random.default_rng(0)
    known, unknown = (rng.normal(middle, 0.1, 2000).astype(np.float32) for middle in (1.0, 1.02))
    result = assess([draw_of(known, unknown, classes=40)], IndexSettings())
    assert result.auroc.low > 0.5
    assert not result.separates
    assert (result.threshold, result.false_accepts.value) == (MAX_DISTANCE, 1)
    assert "To reject them, raise index.false_reject_rate" in result.summary()
    raised = IndexSettings(false_reject_rate=round(result.required_reject_rate + 0.01, 2))
    followed = assess([draw_of(known, unknown, classes=40)], raised)
    assert followed.separates
    assert followed.false_accepts.value == pytest.approx(0.05, abs=0.01)


def test_reason_for_no_threshold_holds_for_few_different_classes_too():
    """One known class has only distant images, so that the interval of the classes reaches 0.5."""
    known = np.append(NEAR, [9.0] * 20).astype(np.float32)
    known_sample = Sample(known, (np.append(np.zeros(len(NEAR), int), np.ones(20, int)),))
    unknown_sample = Sample(FAR, (np.arange(len(FAR)) % 2,))
    result = assess([Draw(known_sample, unknown_sample, known, FAR)], IndexSettings())
    assert result.auroc.low < 0.5 < result.auroc.value
    assert result.threshold == MAX_DISTANCE
    assert "would accept most images" in result.summary()


def test_added_classes_are_asked_after_their_images_joined_the_gallery(open_set: OpenSet):
    share = open_set.added_recognized
    assert 0.1 < share.low < share.value < share.high <= 1
    assert not open_set.added_in_halves
    assert open_set.describe_added().startswith(
        f"Of later images of a class that is added with 20 images and without training, about {share.value:.0%} are"
    )
    assert OpenSet(held_out=()).describe_added() == ""


def test_an_added_image_counts_if_its_label_wins_within_the_threshold():
    sample = Sample(np.array([0.1, 0.2, 1.5, 0.1], np.float32), (np.arange(4),))
    added = Added(sample, np.array([True, True, True, False]))
    result = assess([draw_of(NEAR / 2, FAR)._replace(added=added)], IndexSettings(false_reject_rate=0.2))
    assert result.added_recognized.value == 0.5


def two_days(rng: np.random.Generator, apart: float) -> NDArray[np.float32]:
    """Ten images of a class on each of two days, in turns."""
    days = rng.normal(0, 1, (2, 16)) * apart
    vectors = rng.normal(0, 0.05, (20, 16)) + 1 + days[np.arange(20) % 2]
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_a_half_contains_whole_scenes():
    for seed in range(20):
        half = half_of_scenes(two_days(np.random.default_rng(seed), 0.3))
        assert set(np.flatnonzero(half) % 2) in ({0}, {1})
        assert half.sum() == 10


def test_images_without_scenes_are_divided_at_random():
    """The means of the two sides of the median would differ by 1.6 standard deviations."""
    differences: list[float] = []
    for seed in range(20):
        vectors = two_days(np.random.default_rng(seed), 0.0)
        half = half_of_scenes(vectors)
        centered = vectors - vectors.mean(axis=0)
        along = centered @ np.linalg.svd(centered)[2][0]
        differences.append(abs(along[half].mean() - along[~half].mean()) / along.std())
    assert np.mean(differences) < 0.8


@pytest.mark.parametrize("count", [2, 3])
def test_few_or_equal_images_are_halved(count: int):
    assert half_of_scenes(np.eye(count, dtype=np.float32)).sum() == 1
    assert half_of_scenes(np.ones((count, 4), np.float32)).sum() == 1


def test_added_photographs_are_asked_with_the_other_day(make_embeddings: MakeEmbeddings, tmp_path: Path):
    """A random split asks with images of the days in the gallery."""
    build_index(make_embeddings({"gallery": blobs(1, 60), "query": blobs(2, 60)}), LABELS, IndexSettings(), tmp_path)
    gallery, vectors = Gallery.open(tmp_path, NETWORK), two_days(np.random.default_rng(0), 0.3)
    joining = AddedVectors(vectors[:12], np.full(12, 9, np.int32))
    others = OtherImages(Sample(np.zeros(8, np.float32), (np.full(8, 9, np.int32),)), vectors[12:])
    same_days, other_day = _ask_added(gallery, joining, others), _ask_in_halves(gallery, joining, others)
    assert len(other_day.right) == 20
    assert other_day.sample.distances.min() > same_days.sample.distances.max()


def superpopulation(rng: np.random.Generator, classes: tuple[int, int], spread: float, shift: float) -> Draw:
    """A draw of (known, held-out) classes, whose mean distances differ by ``spread``."""
    samples: list[Sample] = []
    for count, middle in zip(classes, (0.0, shift), strict=True):
        of_class = np.repeat(np.arange(count, dtype=np.int32), 30)
        distances = 1 + (rng.normal(middle, spread, count)[of_class] + rng.normal(size=len(of_class))) / 10
        samples.append(Sample(distances.astype(np.float32), (of_class,)))
    return Draw(*samples, samples[0].distances, samples[1].distances)


@pytest.mark.parametrize(
    ("classes", "spread", "shift"), [((2, 1), 0.3, 1.0), ((8, 2), 0.5, 0.3), ((16, 4), 0.5, 1.5), ((65, 16), 0.3, 1.0)]
)
def test_interval_of_the_auroc_contains_the_spread_between_classes(classes, spread, shift):
    rng, trials = np.random.default_rng(0), 100
    truth = NormalDist().cdf(shift / math.sqrt(2 + 2 * spread**2))
    inside = of_images = 0
    for _ in range(trials):
        draw = superpopulation(rng, classes, spread, shift)
        area = assess([draw], IndexSettings()).auroc
        inside += area.low <= truth <= area.high
        known, unknown = draw.known.distances, draw.unknown.distances
        _, low, high = auroc_interval(place(known, unknown), len(known), len(unknown), 0.95)
        of_images += low <= truth <= high
    assert inside >= 88
    assert of_images < 85


def test_interval_of_the_shares_contains_the_spread_between_classes():
    """All of one class are accepted, and a twentieth of the other: a third could be either."""
    near, far = np.linspace(0, 0.5, 500, dtype=np.float32), np.linspace(1, 1.5, 500, dtype=np.float32)
    unknown = Sample(np.concatenate([near, far]), (np.repeat([0, 1], 500),))
    known = Sample(near, (np.arange(500) % 8,))
    accepted = assess([Draw(known, unknown, near, far)], IndexSettings(false_reject_rate=0.05)).false_accepts
    assert accepted.value == 0.525
    assert accepted.high - accepted.low > 0.6


def test_images_of_one_group_count_as_one():
    """The same distances in every frame of a scene say as much as one frame."""
    rng = np.random.default_rng(0)
    known, unknown = (np.repeat(rng.normal(middle, 0.1, 40), 25).astype(np.float32) for middle in (1.0, 1.1))
    by_class = tuple(Sample(part, (np.arange(1000) % 20,)) for part in (known, unknown))
    by_scene = tuple(Sample(part.distances, (*part.clusterings, np.arange(1000) // 25)) for part in by_class)
    frames, scenes = (assess([Draw(*part, known, unknown)], IndexSettings()).auroc for part in (by_class, by_scene))
    assert frames.value == scenes.value
    assert scenes.high - scenes.low > 1.5 * (frames.high - frames.low)


def test_each_draw_is_compared_with_itself():
    """The second network's distances are larger."""
    near, far = NEAR / 2, FAR / 2
    one = assess([draw_of(near, far)], IndexSettings(false_reject_rate=0.2))
    two = assess([draw_of(near, far), draw_of(1.1 * near, 1.1 * far)], IndexSettings(false_reject_rate=0.2))
    assert two.auroc.value == pytest.approx(one.auroc.value, abs=1e-6)
    assert two.reject_rate == pytest.approx(one.reject_rate, abs=0.03)
    assert two.false_accepts.value == pytest.approx(one.false_accepts.value, abs=0.01)
    assert "in 2 draws" in two.summary()


def test_interval_of_the_accepted_images_contains_the_spread_of_a_threshold_from_few_known_images():
    """Three odd ones of 20 known images set the threshold, which says little. With 40 times as
    many of each kind, the share is certain."""
    known = np.append(np.linspace(0.2, 0.8, 17), [1.1, 1.15, 1.2]).astype(np.float32)
    unknown = np.linspace(0.9, 1.4, 200, dtype=np.float32)
    few, many = (
        assess([draw_of(np.repeat(known, times), unknown)], IndexSettings()).false_accepts for times in (1, 40)
    )
    assert few.low == 0
    assert few.high > few.value > 0.4
    assert many.low > 0.25


def test_draws_of_one_scale_share_the_threshold():
    """In the second draw, the known images are nearer, which is no reason for another threshold."""
    near, far = NEAR / 2, FAR / 2
    measured = assess([draw_of(near, far), draw_of(near / 2, far)], IndexSettings(), one_scale=True)
    assert measured.relative_threshold is None
    assert measured.threshold == pytest.approx(np.quantile(far, 0.05), abs=0.01)
    accepted = np.concatenate([far, far]) <= measured.threshold
    assert measured.false_accepts.count == accepted.sum()


def test_frames_of_few_scenes_do_not_prove_that_distances_separate():
    """Three scenes of 100 frames: as images they separate significantly, as scenes they do not."""
    rng = np.random.default_rng(1)
    known, unknown = (
        np.repeat(np.array(scenes), 100) + rng.normal(0, 0.01, 300) for scenes in ([0.5, 0.6, 0.7], [0.55, 0.65, 0.75])
    )
    by_class = tuple(Sample(part.astype(np.float32), (np.arange(300) % 2,)) for part in (known, unknown))
    by_scene = tuple(Sample(part.distances, (*part.clusterings, np.arange(300) // 100)) for part in by_class)
    frames, scenes = (
        assess([Draw(*part, part[0].distances, part[1].distances)], IndexSettings()) for part in (by_class, by_scene)
    )
    assert frames.separates
    assert not scenes.separates
    assert scenes.threshold == MAX_DISTANCE


def test_basis_says_how_many_classes_and_draws_the_figures_rest_on():
    classes = tuple(f"class {number}" for number in range(80))
    one, five = (
        assess([draw_of(NEAR, FAR)] * draws, IndexSettings()).model_copy(update={"held_out": classes})
        for draws in (1, 5)
    )
    assert one.rests_on() == (
        "The threshold rests on 200 images of known and 200 of held-out classes, and the figures on 200 and 200 "
        "others, with one network that does not know 80 classes."
    )
    assert "The threshold rests on 1,000 images of known" in five.rests_on()
    assert "with 5 networks, each of which does not know some of 80 classes." in five.rests_on()
    assert OpenSet(held_out=()).rests_on() == ""
    assert "for the 80 classes held out in 5 draws (class 0, class 1, class 2, class 3, class 4 and 75 more)" in (
        five.summary()
    )


def test_probe_is_deterministic_and_survives_json(system: System, open_set: OpenSet):
    again = probe_open_set(
        system.dataset, TINY, EvaluationSettings(probe_epochs=4), IndexSettings(false_accept_rate=0.05)
    )
    assert OpenSet.model_validate_json(again.model_dump_json()) == open_set


def test_classes_without_gallery_images_do_not_affect_other_classes(tmp_path: Path):
    """By chance, two of four classes have no gallery images."""
    pixels, digits = load_digits()
    for digit in range(4):
        images = iter((pixels[digits == digit] * 15).astype(np.uint8))
        for split, count in {"train": 10, "test": 3, "query": 2, "gallery": 3 if digit < 2 else 0}.items():
            folder = tmp_path / "images" / split / str(digit)
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(next(images)).save(folder / f"{number}.png")
    dataset = dataset_of(tmp_path / "images", tmp_path / "store")
    recipe = TINY.model_copy(update={"epochs": 1, "batch_size": 16})
    assert probe_open_set(dataset, recipe, EvaluationSettings(probe_epochs=1), IndexSettings()) == OpenSet(held_out=())


def test_too_few_classes_skip_the_probe(system: System):
    manifest = system.dataset.manifest
    shards = tuple(
        shard.model_copy(update={"label_counts": {"0": 5, "1": 5}}) if shard.split == "test" else shard
        for shard in manifest.shards
    )
    two_classes = opened(manifest.model_copy(update={"shards": shards}))
    nothing = probe_open_set(two_classes, TINY, EvaluationSettings(), IndexSettings())
    assert nothing == OpenSet(held_out=())


@pytest.mark.parametrize(("draw_s", "draws"), [(20.0, 1), (4.0, 3), (2.0, PROBE_DRAWS)])
def test_no_draw_begins_that_would_end_after_the_time(system: System, monkeypatch, draw_s: float, draws: int):
    """The probe has a fifth of the minute."""
    head, clock = TrainSettings(weights="some.safetensors", layers="head", minutes=1), Clock(lambda: 0.0)

    def measure(*_: object) -> Draw:
        clock.resume(draw_s)
        return draw_of(NEAR, FAR)

    monkeypatch.setattr(probe_module, "choose_opener", lambda *_: lambda _: None)
    monkeypatch.setattr(probe_module, "_measure_draw", measure)
    measured = probe_open_set(system.dataset, head, EvaluationSettings(), IndexSettings(), clock=clock)
    assert measured.draws == draws
    assert len(measured.held_out) == 2 * draws


@pytest.mark.parametrize(
    ("weights", "group", "in_halves"), [("", "", False), ("w.pth", "", True), ("w.pth", "stem", False)]
)
def test_only_photographs_without_groups_are_asked_in_halves(tmp_path: Path, monkeypatch, weights, group, in_halves):
    """Groups hold out whole days, and images that are no photographs are not taken in sessions."""
    rng = np.random.default_rng(0)
    for number in range(160):
        path = tmp_path / "images" / "abcd"[number % 4] / f"day{number}_1.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(path)
    fractions = {"test_fraction": 0.2, "query_fraction": 0.2, "gallery_fraction": 0.2}
    dataset = dataset_of(tmp_path / "images", tmp_path / "store", group=group, **fractions)
    asked: list[bool] = []

    def measure(*given: object) -> Draw:
        asked.append(bool(given[-1]))
        return draw_of(NEAR, FAR)

    monkeypatch.setattr(probe_module, "choose_opener", lambda *_: lambda _: None)
    monkeypatch.setattr(probe_module, "_measure_draw", measure)
    settings = TrainSettings(weights=weights, layers="head" if weights else None)
    measured = probe_open_set(dataset, settings, EvaluationSettings(), IndexSettings())
    assert set(asked) == {in_halves}
    assert measured.added_in_halves == in_halves
    assert ("set data.group" in measured.scope()) == in_halves


def test_a_frozen_backbone_has_more_queries_and_only_train_images_in_its_gallery(system, pretrained, tmp_path):
    dataset, store = system.dataset, open_store((tmp_path / "store").as_uri())
    asked = with_more_queries(dataset)
    assert asked.count("query") == dataset.count("query") + dataset.count("gallery")
    frozen = pretrained.model_copy(update={"frozen": True})
    recognizer = choose_opener(dataset, asked, frozen, IndexSettings(), None, store, Clock())(frozenset("37"))
    counts = asked.manifest.label_counts("train")
    assert len(recognizer.gallery.label_indices) == sum(count for label, count in counts.items() if label not in "37")
    settings = TrainSettings(backbone="test_resnet", weights=pretrained.weights, backbone_size_px=16, frozen=True)
    probed = probe_open_set(dataset, settings, EvaluationSettings(), IndexSettings(), store=store)
    assert probed.calibrated_unknown == asked.count("query")
    assert probed.calibrated_known == (probed.draws - 1) * asked.count("query")
    assert probed.relative_threshold is None
    assert probed.threshold is not None


def test_a_class_without_train_images_keeps_the_gallery(system: System):
    shards = tuple(
        shard.model_copy(update={"label_counts": {**shard.label_counts, "0": 0}}) if shard.split == "train" else shard
        for shard in system.dataset.manifest.shards
    )
    dataset = opened(system.dataset.manifest.model_copy(update={"shards": shards}))
    assert with_more_queries(dataset) is dataset


@pytest.fixture(scope="module")
def pretrained(system: System, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    import timm

    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(timm.create_model("test_resnet", num_classes=0).state_dict(), path)
    options = {"embedding_dim": 32, "min_steps": 60, "epochs": 1}
    settings = TrainSettings(backbone="test_resnet", weights=str(path), backbone_size_px=16, **options)
    return with_defaults(settings, system.dataset, views=1)


@pytest.mark.parametrize("frozen", [pytest.param(True, marks=pytest.mark.slow), False])
def test_it_embeds_as_the_exported_network(system, pretrained, tmp_path, frozen) -> None:
    dataset, store = system.dataset, open_store((tmp_path / "store").as_uri())
    recipe, index, held_out = pretrained.model_copy(update={"frozen": frozen}), IndexSettings(k=1), frozenset("37")
    recognizer = choose_opener(dataset, dataset, recipe, index, None, store, Clock())(held_out)

    trained, network, embeddings = (tmp_path / name for name in ("trained", "network", "embeddings"))
    train_network(dataset, recipe, trained, store, exclude_labels=held_out)
    exported = export_network(trained, dataset, network, store)
    embed_dataset(network, dataset, embeddings, store=store)
    build_index(Embeddings.open(embeddings), dataset.labels, index, tmp_path / "index", held_out)
    gallery, embedder = Gallery.open(tmp_path / "index", exported.sha256), ExportedEmbedder(network, store)

    assert (recognizer.gallery.label_indices == gallery.label_indices).all()
    for shard in dataset.shards("test"):
        pairs = zip(
            recognizer.embed([(dataset.shard_blocks(shard, 64), shard.count)]),
            embedder.embed([(dataset.shard_blocks(shard, 64), shard.count)]),
            strict=True,
        )
        for (block, eager), (_, served) in pairs:
            assert eager.shape == (len(block), exported.embedding_dim)
            np.testing.assert_allclose(eager, served, atol=1e-5)
            probed, searched = recognizer.gallery.search(eager, 1), gallery.search(served, 1)
            np.testing.assert_allclose(probed.distances, searched.distances, atol=1e-4)
