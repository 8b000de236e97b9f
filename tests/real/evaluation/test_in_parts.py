"""An evaluation in parts is the evaluation in one process: each query, each image on the run page,
each figure."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from evernear.common.parts import Parts
from evernear.common.run_parts import Processes, run_part, run_parts
from evernear.common.store import Store, open_store
from evernear.data.shards import Dataset
from evernear.embedding.embed import embed_dataset
from evernear.embedding.embeddings import Embeddings
from evernear.errors import DataError, IntegrityError
from evernear.evaluation.evaluate import ReleasedSystem, evaluate_systems
from evernear.evaluation.example_collector import ExampleCollector
from evernear.evaluation.in_parts import open_here, plan_answers, stored_answers, systems_to_measure
from evernear.evaluation.open_set import OpenSet
from evernear.evaluation.recognizer import Recognizer
from evernear.index.build import build_index
from evernear.settings import DataSettings, IndexSettings
from tests.releases import System
from tests.small_ingest import ingest_small

BATCH_SIZE = 50
EACH_SHARD = 1


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Digits whose test split has several shards."""
    directory = tmp_path_factory.mktemp("sharded")
    settings = DataSettings(source="digits", test_fraction=0.8, gallery_fraction=0.1)
    uri = (directory / "store").as_uri()
    return Dataset(ingest_small(settings, uri), open_store(uri))


@pytest.fixture(scope="module")
def systems(system: System, dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recognizer]:
    """A candidate, a champion that lacks a class, and an anchor that lacks two."""
    directory = tmp_path_factory.mktemp("systems")
    embed_dataset(system.network_dir, dataset, directory / "embeddings")
    systems: dict[str, Recognizer] = {}
    for name, excluded in (("candidate", ""), ("champion", "7"), ("anchor", "38")):
        vectors = Embeddings.open(directory / "embeddings")
        build_index(vectors, dataset.labels, IndexSettings(), directory / name, frozenset(excluded))
        version = "" if name == "candidate" else f"20260101.000000.{name}"
        systems[name] = Recognizer.open(system.network_dir, directory / name, version)
    return systems


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path.as_uri())


def plan(dataset: Dataset, systems: dict[str, Recognizer], store: Store) -> Parts:
    return plan_answers(dataset, systems, store, "parts/run", BATCH_SIZE, EACH_SHARD)


def test_rows_concatenated_in_order_are_measured_as_in_one_process(
    dataset: Dataset, systems: dict[str, Recognizer], store: Store
) -> None:
    champion, anchor = (ReleasedSystem(systems[name], dataset) for name in ("champion", "anchor"))
    assert systems_to_measure(dataset, systems["candidate"], champion, anchor) == systems
    parts = plan(dataset, systems, store)
    assert parts.plan.parts == len(dataset.shards("test")) >= 3
    worker = open_here(systems, dataset, parts)
    for number in [*reversed(range(parts.plan.parts)), 1]:
        run_part(parts, number, worker)

    results = []
    with stored_answers(parts, dataset) as stored:
        for answered in (None, stored):
            collector = ExampleCollector(systems["candidate"], dataset)
            evaluation = evaluate_systems(
                systems["candidate"],
                champion,
                dataset,
                OpenSet(held_out=()),
                observers=[collector.add],
                anchor=anchor,
                answered=answered,
                batch_size=BATCH_SIZE,
            )
            results.append((evaluation, collector.finish(dataset)))

    (one, one_examples), (many, many_examples) = results
    assert many.model_dump() == one.model_dump()
    assert many.candidate.queries_sha256 == one.candidate.queries_sha256
    assert many.anchor is not None
    assert many.anchor.measurement is not None
    assert len({many.candidate.accuracy, many.anchor.measurement.accuracy}) == 2
    assert len(one_examples.mistakes) > 0
    times = {"embed_ms", "search_ms"}
    for name in type(one_examples).model_fields:
        if name not in ("index", "map"):
            assert getattr(many_examples, name) == getattr(one_examples, name), name
    for one_point, other in zip(one_examples.map, many_examples.map, strict=True):
        assert one_point.model_dump(exclude={"x", "y"}) == other.model_dump(exclude={"x", "y"})
    assert many_examples.index.model_dump(exclude=times) == one_examples.index.model_dump(exclude=times)


def test_parts_follow_from_the_systems_and_are_answered_once(
    dataset: Dataset, systems: dict[str, Recognizer], store: Store
) -> None:
    parts = plan(dataset, systems, store)
    run_parts(parts, Processes(1, partial(open_here, systems, dataset)), lambda *_: None)
    again = plan(dataset, systems, store)
    assert again.plan == parts.plan
    assert again.missing() == []
    without = plan(dataset, {"candidate": systems["candidate"]}, store)
    assert without.folder != parts.folder, "another champion has other answers"


def test_damaged_answers_are_an_error(dataset: Dataset, systems: dict[str, Recognizer], store: Store) -> None:
    parts = plan(dataset, {"candidate": systems["candidate"]}, store)
    run_parts(parts, Processes(1, partial(open_here, {"candidate": systems["candidate"]}, dataset)), lambda *_: None)
    (first, *_) = (info.key for info in store.list("parts/") if info.key.endswith(".npz"))
    store.put(first, b"damaged")
    with pytest.raises(IntegrityError, match=f"{first} is damaged"), stored_answers(parts, dataset):
        pass


def test_systems_for_other_images_are_refused_before_any_part(dataset: Dataset, systems: dict[str, Recognizer]) -> None:
    candidate = systems["candidate"]
    wide = candidate.preprocessing.model_copy(update={"width_px": 9})
    with pytest.raises(DataError, match="The candidate takes images of"):
        systems_to_measure(dataset, replace(candidate, preprocessing=wide), None, None)
    anchor = ReleasedSystem(replace(systems["anchor"], preprocessing=wide), dataset)
    champion = ReleasedSystem(systems["champion"], dataset)
    assert set(systems_to_measure(dataset, candidate, champion, anchor)) == {"candidate", "champion"}
