import numpy as np
import pytest

from evernear.errors import SettingsError
from evernear.index import build
from evernear.index.build import build_index
from evernear.index.description import IndexDescription
from evernear.index.faiss_compat import faiss
from evernear.index.search import Gallery
from evernear.settings import IndexSettings
from tests.gallery_vectors import NETWORK, MakeEmbeddings, blobs

LABELS = tuple("abcde")
GALLERY, QUERIES = blobs(1, 6000, spread=0.2), blobs(2, 1500, spread=0.2)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch):
    """Every gallery counts as too large for exact search and for fp16, and 90% recall suffices."""
    monkeypatch.setattr(build, "RECALL", 0.9)
    monkeypatch.setattr(build, "FLAT_BYTES", 1)
    monkeypatch.setattr(build, "COMPRESSED_FROM_BYTES", 1)


@pytest.fixture(scope="module")
def embeddings(make_embeddings: MakeEmbeddings):
    return make_embeddings({"gallery": GALLERY, "query": QUERIES}, rows_per_shard=2000)


def recall(description: IndexDescription) -> float:
    return description.calibration.nearest_found / description.calibration.queries


def test_small_gallery_is_searched_exactly_with_the_results_of_flat(embeddings, tmp_path):
    automatic = build_index(embeddings, LABELS, IndexSettings(), tmp_path / "auto")
    flat = build_index(embeddings, LABELS, IndexSettings(type="Flat"), tmp_path / "flat")
    assert (automatic.factory, automatic.search, flat.reason) == ("Flat", "", "")
    assert automatic.reason == "exact search of 0 MB is fast enough"
    assert automatic.digest == flat.digest
    assert (tmp_path / "auto/index.faiss").read_bytes() == (tmp_path / "flat/index.faiss").read_bytes()


def test_large_gallery_gets_the_smallest_index_that_reaches_the_recall(embeddings, tmp_path, large):
    described = build_index(embeddings, LABELS, IndexSettings(), tmp_path)
    assert described.factory == "IVF153,RaBitQ8"
    assert 0.9 < recall(described) < 0.97
    assert "RaBitQ8 takes" in described.reason
    assert f"finds {described.calibration.nearest_found:,} of 1,500" in described.reason
    assert (tmp_path / "index.faiss").stat().st_size < GALLERY[0].nbytes
    # The index is saved with its search parameters.
    gallery = Gallery.open(tmp_path, NETWORK)
    exact = (QUERIES[0] @ GALLERY[0].T).max(axis=1)
    hits = gallery.search(QUERIES[0], 1).distances[:, 0]
    assert (np.abs(2 - 2 * exact - hits**2) < 1e-2).mean() > 0.9


def test_gallery_of_medium_size_is_stored_as_fp16(embeddings, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "FLAT_BYTES", 1)
    monkeypatch.setattr(build, "RECALL", 0.9)
    described = build_index(embeddings, LABELS, IndexSettings(), tmp_path)
    assert described.factory == "IVF153,SQfp16"


def test_fewest_lists_are_probed(embeddings, tmp_path, large):
    described = build_index(embeddings, LABELS, IndexSettings(), tmp_path)
    probes = int(described.search.removeprefix("nprobe="))
    fewer = IndexSettings(type=described.factory, search=f"nprobe={probes // 2}")
    assert recall(build_index(embeddings, LABELS, fewer, tmp_path / "fewer")) < 0.9


def test_more_exact_index_is_chosen_if_compression_loses_too_much(embeddings, tmp_path, large, monkeypatch):
    monkeypatch.setattr(build, "CODES", ("PQ2x4", "SQfp16", "Flat"))
    described = build_index(embeddings, LABELS, IndexSettings(), tmp_path)
    assert described.factory == "IVF153,SQfp16"
    assert "PQ2x4 takes" in described.reason
    assert "too few for a recall of 0.9" in described.reason


def test_gallery_is_searched_exactly_if_no_index_reaches_the_recall(embeddings, tmp_path, large, monkeypatch):
    monkeypatch.setattr(build, "CODES", ("PQ2x4",))
    described = build_index(embeddings, LABELS, IndexSettings(), tmp_path)
    assert (described.factory, described.search) == ("Flat", "")
    assert described.reason.endswith("exact search remains")
    assert recall(described) == 1


def test_gallery_is_searched_exactly_if_the_queries_cannot_show_the_recall(embeddings, tmp_path, large, monkeypatch):
    monkeypatch.setattr(build, "RECALL", 0.999)
    described = build_index(embeddings, LABELS, IndexSettings(), tmp_path)
    assert described.factory == "Flat"
    assert described.reason == "1,500 queries are too few to show a recall of 0.999, so the search is exact"


def test_search_parameters_need_an_explicit_type(embeddings, tmp_path):
    with pytest.raises(SettingsError, match=r"index\.search = 'nprobe=3' needs an index\.type"):
        build_index(embeddings, LABELS, IndexSettings(search="nprobe=3"), tmp_path)


def test_lists_have_enough_training_vectors():
    assert build._number_of_lists(1_000_000) == 4096
    assert build._number_of_lists(200_000) == 2048
    for size in (50, 5_000, 10_000_000):
        lists = build._number_of_lists(size)
        assert 1 <= lists <= min(size, build.TRAINING_VECTORS) / 39


def test_lower_bound_is_that_of_wilson():
    from evernear.evaluation.statistics import proportion

    for hits in (0, 90, 99, 100):
        assert build._lower_bound(hits, 100) == pytest.approx(proportion(hits, 100, 0.95).low, abs=1e-12)


def test_every_encoding_of_an_inverted_file_is_known_to_faiss():
    for code in build.CODES:
        assert faiss.index_factory(128, f"IVF64,{code}", faiss.METRIC_INNER_PRODUCT).nlist == 64
