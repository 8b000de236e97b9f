import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from evernear.common.disk import sha256_file
from evernear.errors import DataError, IntegrityError, SettingsError, StoreError
from evernear.index import build
from evernear.index.build import build_index
from evernear.index.description import IndexDescription, describe_index
from evernear.index.faiss_compat import core_type
from evernear.index.search import Gallery
from evernear.settings import IndexSettings
from tests.fast.index.conftest import MakeSettings
from tests.gallery_vectors import NETWORK, MakeEmbeddings, blobs
from tests.limits import largest_file

LABELS = ("zero", "one", "two", "three", "four", "never seen")


def test_index_description_records_its_inputs(make_embeddings, index_settings, tmp_path):
    gallery = blobs(1, 130)
    embeddings = make_embeddings({"gallery": gallery, "query": blobs(2, 50)})
    described = build_index(embeddings, LABELS, index_settings(k=3), tmp_path)

    assert describe_index(tmp_path) == described
    assert described.network_sha256 == NETWORK
    assert described.dataset_digest == "d" * 64
    assert (described.dim, described.size, described.k) == (16, 130, 3)
    assert described.counts == (*np.bincount(gallery[1]).tolist(), 0)
    assert described.known_labels == LABELS[:5]
    for name, sha256 in described.parts.items():
        assert sha256_file(tmp_path / name) == sha256


def test_index_build_is_deterministic(make_embeddings: MakeEmbeddings, index_settings: MakeSettings, tmp_path):
    embeddings = make_embeddings({"gallery": blobs(1, 130), "query": blobs(2, 50)})
    digests = {build_index(embeddings, LABELS, index_settings(), tmp_path / name).digest for name in ("a", "b")}
    assert len(digests) == 1
    assert build_index(embeddings, LABELS, index_settings(k=1), tmp_path / "c").digest not in digests


def test_recall_below_the_required_one_is_a_warning(make_embeddings: MakeEmbeddings, tmp_path):
    embeddings = make_embeddings({"gallery": blobs(1, 300), "query": blobs(2, 130)})
    exact = build_index(embeddings, LABELS, IndexSettings(type="Flat"), tmp_path)
    start = f"300 vectors, Flat; unknown beyond {exact.threshold:.3f}; 1.7% to 9.8% of new "
    assert exact.summary().startswith(start)
    approximate = build_index(embeddings, LABELS, IndexSettings(type="IVF32,Flat"), tmp_path)
    share = approximate.calibration.nearest_found / 130
    assert f"WARNING: recall@1 is {share:.2%}, less than 99%" in approximate.summary()


@pytest.mark.parametrize("missing_bytes", [100, 50_000], ids=["on closing", "before"])
def test_full_disk_leaves_no_index(make_embeddings: MakeEmbeddings, tmp_path, missing_bytes: int):
    embeddings = make_embeddings({"gallery": blobs(1, 1500), "query": blobs(2, 50)})
    build_index(embeddings, LABELS, IndexSettings(), tmp_path)
    size_bytes = (tmp_path / "index.faiss").stat().st_size
    with (
        largest_file(size_bytes - missing_bytes),
        pytest.raises(StoreError, match=r"index\.faiss would exceed the file size limit"),
    ):
        build_index(embeddings, LABELS, IndexSettings(), tmp_path)
    with pytest.raises(IntegrityError, match="run the index step again"):
        describe_index(tmp_path)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    "chosen",
    [
        {"type": "Flaat"},
        {"type": "IVF512,Flat"},  # too few vectors to train
        {"type": "NSG8,Flat"},  # too few vectors to add
        {"type": "IDMap,Flat"},  # nothing to add to
        {"search": "nprobe=3"},  # a parameter of another type
        {"type": "IVF4,Flat", "search": "nprobe=0"},
    ],
    ids=str,
)
def test_invalid_setting_is_named(make_embeddings: MakeEmbeddings, tmp_path, chosen: dict[str, str]):
    embeddings = make_embeddings({"gallery": blobs(1, 90), "query": blobs(2, 50)})
    with pytest.raises(SettingsError) as raised:
        build_index(embeddings, LABELS, IndexSettings.model_validate(chosen), tmp_path)
    *_, (name, value) = chosen.items()
    assert f"index.{name} = '{value}'" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not any(tmp_path.iterdir())


def test_index_training_loads_only_the_sample(make_embeddings: MakeEmbeddings, tmp_path, monkeypatch):
    monkeypatch.setattr("evernear.index.build.TRAINING_VECTORS", 200)
    gallery = blobs(1, 20_000)
    embeddings = make_embeddings({"gallery": gallery, "query": blobs(2, 50)}, rows_per_shard=500)
    tracemalloc.start()
    build_index(embeddings, LABELS, IndexSettings(type="IVF4,Flat"), tmp_path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < gallery[0].nbytes


@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat"])
def test_empty_gallery_is_rejected(make_embeddings: MakeEmbeddings, tmp_path, factory):
    with pytest.raises(DataError, match="gallery is empty"):
        build_index(make_embeddings({"query": blobs(2, 50)}), LABELS, IndexSettings(type=factory), tmp_path)


def test_nan_embeddings_are_rejected(make_embeddings: MakeEmbeddings, index_settings: MakeSettings, tmp_path):
    vectors, labels = blobs(1, 130)
    vectors[77] = np.nan
    with pytest.raises(IntegrityError, match="not finite"):
        build_index(make_embeddings({"gallery": (vectors, labels)}), LABELS, index_settings(), tmp_path)


# The choice of the index


LETTERS = tuple("abcde")
GALLERY, QUERIES = blobs(1, 6000, spread=0.2), blobs(2, 1500, spread=0.2)


@pytest.fixture
def counted_as_large(monkeypatch: pytest.MonkeyPatch):
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
    automatic = build_index(embeddings, LETTERS, IndexSettings(), tmp_path / "auto")
    flat = build_index(embeddings, LETTERS, IndexSettings(type="Flat"), tmp_path / "flat")
    assert (automatic.factory, automatic.search, flat.reason) == ("Flat", "", "")
    assert automatic.reason == "exact search of 384 kB is fast enough"
    assert automatic.digest == flat.digest
    assert (tmp_path / "auto/index.faiss").read_bytes() == (tmp_path / "flat/index.faiss").read_bytes()


def test_large_gallery_gets_the_smallest_index_that_reaches_the_recall(embeddings, tmp_path, counted_as_large):
    described = build_index(embeddings, LETTERS, IndexSettings(), tmp_path, toward_mean=0)
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
    described = build_index(embeddings, LETTERS, IndexSettings(), tmp_path)
    assert described.factory == "IVF153,SQfp16"


def test_fewest_lists_are_probed(embeddings, tmp_path, counted_as_large):
    described = build_index(embeddings, LETTERS, IndexSettings(), tmp_path)
    probes = int(described.search.removeprefix("nprobe="))
    fewer = IndexSettings(type=described.factory, search=f"nprobe={probes // 2}")
    assert recall(build_index(embeddings, LETTERS, fewer, tmp_path / "fewer")) < 0.9


def test_more_exact_index_is_chosen_if_compression_loses_too_much(embeddings, tmp_path, counted_as_large, monkeypatch):
    monkeypatch.setattr(build, "CODES", ("PQ2x4", "SQfp16", "Flat"))
    described = build_index(embeddings, LETTERS, IndexSettings(), tmp_path)
    assert described.factory == "IVF153,SQfp16"
    assert "PQ2x4 takes" in described.reason
    assert "too few for a recall of 0.9" in described.reason


def test_gallery_is_searched_exactly_if_no_index_reaches_the_recall(
    embeddings, tmp_path, counted_as_large, monkeypatch
):
    monkeypatch.setattr(build, "CODES", ("PQ2x4",))
    described = build_index(embeddings, LETTERS, IndexSettings(), tmp_path)
    assert (described.factory, described.search) == ("Flat", "")
    assert described.reason.endswith("exact search remains")
    assert recall(described) == 1


def test_gallery_is_searched_exactly_if_the_queries_cannot_show_the_recall(
    embeddings, tmp_path, counted_as_large, monkeypatch
):
    monkeypatch.setattr(build, "RECALL", 0.999)
    described = build_index(embeddings, LETTERS, IndexSettings(), tmp_path)
    assert described.factory == "Flat"
    assert described.reason == "1,500 queries are too few to show a recall of 0.999, so the search is exact"


# The instructions of the processor


NEW = "avx2 fma avx512f avx512bw avx512cd avx512dq avx512vl amx_tile"
CPUINFO = """processor\t: 0
vendor_id\t: {vendor}
model name\t: A processor
flags\t\t: fpu sse2 {flags}

"""


@pytest.mark.parametrize(
    ("vendor", "flags", "name"),
    [
        ("GenuineIntel", NEW, "SKYLAKEX"),
        ("GenuineIntel", "avx2 fma avx512f", "HASWELL"),
        ("GenuineIntel", "sse3", None),
        ("AuthenticAMD", NEW, None),
    ],
)
def test_openblas_gets_instructions_that_the_processor_has(tmp_path: Path, vendor, flags, name):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(CPUINFO.format(vendor=vendor, flags=flags) * 2)
    assert core_type(tmp_path) == name


def test_openblas_is_left_alone_without_a_description_of_the_processor(tmp_path: Path):
    assert core_type(tmp_path) is None


def test_openblas_of_faiss_uses_these_instructions():
    """OpenBLAS 0.3.15 treats a Sapphire Rapids as a Prescott, and uses SSE3."""
    name = core_type()
    pools = [pool for pool in threadpool_info() if "faiss" in pool["filepath"]]
    found = [pool["architecture"] for pool in pools if pool["internal_api"] == "openblas"]
    if name is None or not found:
        pytest.skip("not an Intel processor with AVX2, or FAISS does not bundle OpenBLAS")
    assert found == [{"SKYLAKEX": "SkylakeX", "HASWELL": "Haswell"}[name]]
