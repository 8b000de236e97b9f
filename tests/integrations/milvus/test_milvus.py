"""Collections and aliases in Milvus."""

import sys
from itertools import islice

import numpy as np
import pytest
from pymilvus import MilvusClient

from evernear.errors import IntegrityError, SettingsError, TransientStoreError
from evernear.index import build
from evernear.index.build import build_index
from evernear.index.description import Collection, IndexDescription
from evernear.index.search import Gallery
from evernear.integrations.milvus import client as milvus_client
from evernear.integrations.milvus import index as milvus
from evernear.settings import IndexSettings
from tests.gallery_vectors import NETWORK, MakeEmbeddings, blobs

LABELS = tuple("abcde")
GALLERY, QUERIES = blobs(1, 2500, spread=0.2), blobs(2, 600, spread=0.2)


@pytest.fixture(scope="module")
def milvus_embeddings(make_embeddings: MakeEmbeddings):
    return make_embeddings({"gallery": GALLERY, "query": QUERIES}, rows_per_shard=1200)


@pytest.fixture
def milvus_settings(milvus_uri: str, request: pytest.FixtureRequest) -> IndexSettings:
    """Settings with an alias that only this test uses."""
    return IndexSettings(backend="milvus", uri=milvus_uri, collection=request.node.originalname)


def client(settings: IndexSettings) -> MilvusClient:
    return MilvusClient(settings.uri)


def collection_of(described: IndexDescription) -> Collection:
    assert described.collection
    return described.collection


def test_collection_has_vectors_labels_and_hashes_for_other_readers(milvus_embeddings, milvus_settings, tmp_path):
    described = build_index(milvus_embeddings, LABELS, milvus_settings, tmp_path, toward_mean=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "labels.npy"]
    collection = collection_of(described)
    assert (collection.uri, collection.alias) == (milvus_settings.uri, milvus_settings.collection)
    row, last = client(milvus_settings).query(
        collection.name, filter="row in [7, 2499]", output_fields=["label", "image", "embedding"]
    )
    assert (row["label"], row["image"]) == (LABELS[GALLERY[1][7]], "00" * 32)
    np.testing.assert_array_equal(np.array([row["embedding"], last["embedding"]], np.float32), GALLERY[0][[7, 2499]])


def test_content_names_the_collection_and_the_same_content_is_written_once(
    milvus_embeddings, milvus_settings, tmp_path, monkeypatch
):
    first = collection_of(build_index(milvus_embeddings, LABELS, milvus_settings, tmp_path / "a"))
    other = collection_of(build_index(milvus_embeddings, ("A", *LABELS[1:]), milvus_settings, tmp_path / "b"))
    graph = collection_of(
        build_index(milvus_embeddings, LABELS, milvus_settings.model_copy(update={"type": "HNSW"}), tmp_path / "c")
    )
    unmoved = collection_of(build_index(milvus_embeddings, LABELS, milvus_settings, tmp_path / "d", toward_mean=0))
    assert len({first.name, other.name, graph.name, unmoved.name}) == 4
    monkeypatch.setattr(milvus, "_rows", lambda gallery: pytest.fail("written again"))
    assert collection_of(build_index(milvus_embeddings, LABELS, milvus_settings, tmp_path / "a")) == first


def test_build_continues_after_a_kill(milvus_embeddings, milvus_settings, tmp_path, monkeypatch):
    def killed(gallery, rows=milvus._rows):
        yield from islice(rows(gallery), 2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(milvus, "_rows", killed)
        with pytest.raises(KeyboardInterrupt):
            build_index(milvus_embeddings, LABELS, milvus_settings, tmp_path, toward_mean=0)
    build_index(milvus_embeddings, LABELS, milvus_settings, tmp_path, toward_mean=0)
    nearest = Gallery.open(tmp_path, NETWORK).search(GALLERY[0], 1)
    np.testing.assert_array_equal(nearest.rows[:, 0], np.arange(2500))


def test_large_gallery_gets_a_graph_that_reaches_the_recall(milvus_embeddings, milvus_settings, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "FLAT_BYTES", 1)
    described = build_index(milvus_embeddings, LABELS, milvus_settings, tmp_path, toward_mean=0)
    assert described.factory == milvus.GRAPH
    assert described.search in milvus.BEAMS
    assert described.calibration.nearest_found >= 0.99 * 600
    assert f"finds {described.calibration.nearest_found:,} of 600" in described.reason
    found = Gallery.open(tmp_path, NETWORK).search(QUERIES[0], 50)
    assert (found.rows >= 0).all()  # the beam is at least as wide as the result


def test_gallery_is_searched_exactly_if_no_graph_reaches_the_recall(
    milvus_embeddings, milvus_settings, tmp_path, monkeypatch
):
    monkeypatch.setattr(milvus, "exact_search_reason", lambda *figures: "")
    monkeypatch.setattr(build, "RECALL", 1.0)  # the lower end of an interval is always less
    described = build_index(milvus_embeddings, LABELS, milvus_settings, tmp_path)
    assert (described.factory, described.search) == ("FLAT", "")
    assert described.reason.endswith("exact search remains")
    collections = [
        name for name in client(milvus_settings).list_collections() if name.startswith(milvus_settings.collection)
    ]
    assert collections == [collection_of(described).name]


def test_changed_collection_is_rejected(milvus_embeddings, milvus_settings, tmp_path):
    name = collection_of(build_index(milvus_embeddings, LABELS, milvus_settings, tmp_path)).name
    client(milvus_settings).delete(name, filter="row in [3]")
    with pytest.raises(IntegrityError, match=f"{name} in Milvus at .* has 2,499 vectors of 16 dimensions, not 2,500"):
        Gallery.open(tmp_path, NETWORK)
    client(milvus_settings).drop_collection(name)
    with pytest.raises(IntegrityError, match=f"{name} in Milvus at .* does not exist; `evernear reindex` fills it"):
        Gallery.open(tmp_path, NETWORK)


def test_collection_that_the_server_released_is_loaded_again(milvus_embeddings, milvus_settings, tmp_path):
    name = collection_of(build_index(milvus_embeddings, LABELS, milvus_settings, tmp_path, toward_mean=0)).name
    gallery = Gallery.open(tmp_path, NETWORK)
    client(milvus_settings).release_collection(name)
    assert gallery.search(GALLERY[0][:2], 1).rows.tolist() == [[0], [1]]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"type": "HNSV"}, "index.type = 'HNSV' does not work in Milvus"),
        ({"type": "HNSW,M"}, "index.type = 'HNSW,M' does not work in Milvus"),
        ({"type": "HNSW", "search": "ef"}, "index.search = 'ef'"),
        ({"search": "ef=3"}, "index.search = 'ef=3' needs an index.type"),
        ({"uri": ""}, "index.backend = milvus needs index.uri"),
    ],
)
def test_invalid_setting_is_named(milvus_embeddings, milvus_settings, tmp_path, changes, named):
    with pytest.raises(SettingsError) as raised:
        build_index(milvus_embeddings, LABELS, milvus_settings.model_copy(update=changes), tmp_path)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not any(tmp_path.iterdir())


def test_unreachable_server_is_named(milvus_embeddings, tmp_path):
    settings = IndexSettings(backend="milvus", uri="http://127.0.0.1:1")
    with pytest.raises(TransientStoreError, match=r"Milvus at http://127\.0\.0\.1:1 cannot be reached: "):
        build_index(milvus_embeddings, LABELS, settings, tmp_path)


def test_missing_client_is_named(milvus_embeddings, milvus_settings, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    with pytest.raises(SettingsError, match=r"^pymilvus is not installed; run `pip install 'evernear\[milvus\]'`\.$"):
        build_index(milvus_embeddings, LABELS, milvus_settings, tmp_path)


def test_environment_names_another_address_than_the_release(milvus_embeddings, milvus_settings, tmp_path, monkeypatch):
    build_index(milvus_embeddings, LABELS, milvus_settings, tmp_path)
    description = tmp_path / "index.json"
    description.write_text(description.read_text().replace(milvus_settings.uri, "http://127.0.0.1:1"))
    with pytest.raises(TransientStoreError):
        Gallery.open(tmp_path, NETWORK)
    monkeypatch.setenv("EVERNEAR_MILVUS_URI", milvus_settings.uri)
    assert Gallery.open(tmp_path, NETWORK).search(GALLERY[0][:1], 1).rows.tolist() == [[0]]


def test_token_is_sent_only_to_the_address_of_the_environment(milvus_settings, tmp_path, monkeypatch):
    (tmp_path / "token").write_text("user:password\n")
    monkeypatch.setenv("EVERNEAR_MILVUS_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(SettingsError, match="but not EVERNEAR_MILVUS_URI"):
        milvus_client.connect(milvus_settings.uri)
    monkeypatch.setenv("EVERNEAR_MILVUS_URI", milvus_settings.uri)
    assert milvus_client._token() == "user:password"
    monkeypatch.setenv("EVERNEAR_MILVUS_TOKEN", "direct")
    assert milvus_client._token() == "direct"
    monkeypatch.delenv("EVERNEAR_MILVUS_TOKEN")
    (tmp_path / "token").unlink()
    with pytest.raises(SettingsError, match="cannot be read"):
        milvus_client._token()


@pytest.mark.parametrize("uri", ["http://user:password@host:19530", "not-a-database", "ftp://host/a.db"])
def test_invalid_address_is_rejected(uri):
    with pytest.raises(ValueError, match="uri"):
        IndexSettings(backend="milvus", uri=uri)
