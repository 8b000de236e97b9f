"""Exports, opened by the libraries that people use."""

import gc
import io
import warnings
from pathlib import Path
from typing import Any

import datasets
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pytest
import webdataset
from PIL import Image

from evernear.common.store import FileStore
from evernear.data.export import Format
from evernear.data.manifest import SPLITS
from evernear.release.export_dataset import export_snapshot
from evernear.release.registry import Registry
from tests.releases import MakeRelease, System

DIM = 16


@pytest.fixture(scope="module")
def version(system: System, make_release: MakeRelease) -> str:
    release = make_release()
    Registry(system.dataset.store).publish(release.archive)
    return release.version


@pytest.fixture(scope="module")
def exported(system: System, version: str, tmp_path_factory: pytest.TempPathFactory) -> dict[Format, Path]:
    """The digits with the embeddings of a release, in several files of a split."""

    def export(form: Format) -> Path:
        out = tmp_path_factory.mktemp(form)
        export_snapshot(system.dataset.store, system.dataset.manifest, FileStore(out), form, version)
        return out

    return {"parquet": export("parquet"), "webdataset": export("webdataset")}


@pytest.fixture(scope="module")
def labels(system: System) -> dict[str, dict[str, str]]:
    """The label of each image by its digest, in each split."""
    return {
        split: {
            digest.tobytes().hex(): system.dataset.labels[label]
            for block in system.dataset.blocks(split)
            for digest, label in zip(block.digests, block.labels, strict=True)
        }
        for split in SPLITS
    }


def first_pixels(system: System, split: Any) -> list[list[int]]:
    return next(system.dataset.blocks(split)).images[0, ..., 0].tolist()


def test_pandas_reads_parquet(exported, labels, system: System) -> None:
    frame = pd.read_parquet(exported["parquet"] / "data")
    for split in SPLITS:
        own = frame[frame["split"] == split]
        assert dict(zip(own["digest"], own["label"], strict=True)) == labels[split]
        assert np.stack(list(own["embedding"])).shape == (len(own), DIM)
        image = Image.open(io.BytesIO(own["image"].iloc[0]["bytes"]))
        assert np.asarray(image).tolist() == first_pixels(system, split)


def test_polars_reads_parquet(exported, labels) -> None:
    frame = pl.read_parquet(exported["parquet"] / "data" / "*.parquet")
    assert frame.schema["embedding"] == pl.Array(pl.Float32, DIM)
    assert frame.schema["image"] == pl.Struct({"bytes": pl.Binary, "path": pl.String})
    for split in SPLITS:
        own = frame.filter(pl.col("split") == split)
        assert dict(own.select("digest", "label").iter_rows()) == labels[split]


def test_duckdb_queries_parquet(exported, labels) -> None:
    with duckdb.connect() as connection:
        rows = connection.execute(
            "SELECT split, count(*), count(DISTINCT digest), min(octet_length(image.bytes)),"
            " max(abs(array_inner_product(embedding::FLOAT[16], embedding::FLOAT[16]) - 1))"
            " FROM read_parquet(?) GROUP BY split",
            [str(exported["parquet"] / "data" / "*.parquet")],
        ).fetchall()
    assert {split: count for split, count, *_ in rows} == {split: len(labels[split]) for split in SPLITS}
    for _, count, distinct, size_bytes, from_one in rows:
        assert count == distinct
        assert size_bytes > 0
        assert from_one < 1e-4


@pytest.fixture
def hugging_face(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A directory for the cache of `datasets`, which must not use the network."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return str(tmp_path / "cache")


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_finds_the_splits_and_decodes_the_images(
    exported, labels, system: System, hugging_face: str, streaming: bool
) -> None:
    loaded = datasets.load_dataset(str(exported["parquet"]), cache_dir=hugging_face, streaming=streaming)
    assert set(loaded) == set(SPLITS)
    for split in SPLITS:
        features = loaded[split].features
        assert features["image"] == datasets.Image()
        assert features["embedding"] == datasets.List(datasets.Value("float32"), length=DIM)
        rows = list(loaded[split])
        assert {row["digest"]: row["label"] for row in rows} == labels[split]
        assert np.asarray(rows[0]["image"]).tolist() == first_pixels(system, split)


def test_datasets_reads_tars(exported, labels, system: System, hugging_face: str) -> None:
    files = {split: str(exported["webdataset"] / f"{split}-*.tar") for split in SPLITS}
    loaded = datasets.load_dataset("webdataset", data_files=files, cache_dir=hugging_face)
    for split in SPLITS:
        rows = list(loaded[split])
        assert {row["json"]["digest"]: row["json"]["label"] for row in rows} == labels[split]
        assert np.asarray(rows[0]["png"]).tolist() == first_pixels(system, split)


def test_webdataset_reads_tars(exported, labels, system: System) -> None:
    for split in SPLITS:
        tars = sorted(map(str, exported["webdataset"].glob(f"{split}-*.tar")))
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):  # it closes no file
            rows = list(webdataset.WebDataset(tars, shardshuffle=False).decode("pil"))
            gc.collect()
        assert {row["json"]["digest"]: row["json"]["label"] for row in rows} == labels[split]
        assert len({row["__key__"] for row in rows}) == len(rows)
        for row in rows:
            assert system.dataset.labels[row["cls"]] == row["json"]["label"]
            assert row["npy"].shape == (DIM,)
        assert np.asarray(rows[0]["png"].convert("L")).tolist() == first_pixels(system, split)
