import tracemalloc

import numpy as np
import pytest

from evernear.common.disk import sha256_file
from evernear.errors import DataError, IntegrityError, SettingsError, StoreError
from evernear.index import build
from evernear.index.build import build_index
from evernear.index.description import describe_index
from evernear.settings import IndexSettings
from tests.fast.index.conftest import MakeSettings
from tests.gallery_vectors import NETWORK, MakeEmbeddings, blobs
from tests.limits import largest_file

LABELS = ("zero", "one", "two", "three", "four", "never seen")


def test_index_description_records_its_inputs(
    make_embeddings: MakeEmbeddings, index_settings: MakeSettings, tmp_path, monkeypatch
):
    monkeypatch.setattr(build, "choose_rule", lambda *_: "centroid")
    gallery = blobs(1, 130)
    embeddings = make_embeddings({"gallery": gallery, "query": blobs(2, 50)})
    described = build_index(embeddings, LABELS, index_settings(k=3), tmp_path)

    assert describe_index(tmp_path) == described
    assert described.network_sha256 == NETWORK
    assert described.dataset_digest == "d" * 64
    assert (described.dim, described.size, described.k, described.label_by) == (16, 130, 3, "centroid")
    assert described.counts == (*np.bincount(gallery[1]).tolist(), 0)
    assert described.known_labels == LABELS[:5]
    for name, sha256 in described.parts.items():
        assert sha256_file(tmp_path / name) == sha256


@pytest.mark.parametrize(("spread", "rule"), [(0.1, "vote"), (0.6, "centroid")])
def test_auto_labels_by_centroid_only_where_that_is_clearly_better(
    make_embeddings: MakeEmbeddings, tmp_path, spread: float, rule: str
):
    splits = {"gallery": blobs(1, 300, spread=spread), "query": blobs(2, 300, spread=spread)}
    described = build_index(make_embeddings(splits), LABELS, IndexSettings(), tmp_path)
    assert described.label_by == rule
    assert describe_index(tmp_path).label_by == rule


def test_index_build_is_deterministic(make_embeddings: MakeEmbeddings, index_settings: MakeSettings, tmp_path):
    embeddings = make_embeddings({"gallery": blobs(1, 130), "query": blobs(2, 50)})
    digests = {build_index(embeddings, LABELS, index_settings(), tmp_path / name).digest for name in ("a", "b")}
    assert len(digests) == 1
    assert build_index(embeddings, LABELS, index_settings(k=1), tmp_path / "c").digest not in digests


def test_recall_below_the_required_one_is_a_warning(make_embeddings: MakeEmbeddings, tmp_path):
    embeddings = make_embeddings({"gallery": blobs(1, 300), "query": blobs(2, 130)})
    exact = build_index(embeddings, LABELS, IndexSettings(type="Flat"), tmp_path)
    start = f"300 vectors, Flat; unknown beyond {exact.threshold:.3f}; 1.3% to 8.7% of new "
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
    ("settings", "named"),
    [
        (IndexSettings(type="Flaat"), "index.type = 'Flaat'"),
        (IndexSettings(type="IVF512,Flat"), "index.type = 'IVF512,Flat'"),
        (IndexSettings(search="nprobe=3"), "index.search = 'nprobe=3'"),
        (IndexSettings(type="NSG8,Flat"), "index.type = 'NSG8,Flat'"),
        (IndexSettings(type="IDMap,Flat"), "index.type = 'IDMap,Flat'"),
        (IndexSettings(type="IVF4,Flat", search="nprobe=0"), "index.search = 'nprobe=0'"),
    ],
    ids=[
        "unknown type",
        "too few vectors to train",
        "parameter of another type",
        "too few vectors to add",
        "nothing to add to",
        "nothing to search",
    ],
)
def test_invalid_setting_is_named(make_embeddings: MakeEmbeddings, tmp_path, settings, named):
    embeddings = make_embeddings({"gallery": blobs(1, 90), "query": blobs(2, 50)})
    with pytest.raises(SettingsError) as raised:
        build_index(embeddings, LABELS, settings, tmp_path)
    assert named in str(raised.value)
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
