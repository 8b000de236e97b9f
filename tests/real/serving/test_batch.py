"""Batch prediction: a whole source through a release into Parquet, in parts that are written
once."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from evernear import steps
from evernear.common.disk import sha256_file
from evernear.common.parts import Parts, run_parts
from evernear.common.run_record import RunRecord
from evernear.common.store import FileStore, open_store
from evernear.data.image_tree import FolderTree
from evernear.errors import ConflictError, DataError, StoreError
from evernear.release.registry import Registry
from evernear.reporting.notify import load_outcome
from evernear.serving import batch
from evernear.serving.batch import FOLDER, Shared, open_worker, plan_predictions, summarize
from evernear.serving.core import Predictor
from evernear.serving.release_source import ReleaseSource
from evernear.serving.responses import Rejection
from tests.command_line import evernear
from tests.releases import MakeRelease

IMAGES = 23


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images at several depths, without classes, with a broken one and two files that are no
    images."""
    folder = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for number in range(IMAGES):
        path = folder / ("a" if number % 3 else "b/c") / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (8, 8), np.uint8)).save(path)
    (folder / "a" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.png").write_bytes(b"")
    (folder / "b" / "loop").symlink_to(folder)
    return folder


@pytest.fixture(scope="module")
def shared(photos: Path, make_release: MakeRelease, tmp_path_factory: pytest.TempPathFactory) -> Shared:
    store = open_store(tmp_path_factory.mktemp("store").as_uri())
    release = make_release()
    Registry(store).publish(release.archive)
    Registry(store).set_champion(release.version, None)
    return Shared(source=f"folder:{photos}", store_uri=store.uri, version=release.version, part_images=7)


def predict(shared: Shared, out: Path) -> Parts:
    parts = plan_predictions(shared, FileStore(out))
    run_parts(parts, open_worker)
    return parts


def files(out: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in sorted(out.glob("*.parquet"))}


def test_every_image_has_the_answer_of_a_server(shared: Shared, photos: Path, tmp_path: Path) -> None:
    parts = predict(shared, tmp_path / "out")
    rows = pq.read_table(tmp_path / "out").to_pylist()  # readers ignore the folder of the plan
    assert [row["path"] for row in rows] == [file.name for file in FolderTree(photos).files()]
    assert len(rows) == IMAGES + 1
    with ReleaseSource(shared.store_uri, shared.version).unpacked() as release:
        answers = Predictor.open(release).predict([(photos / row["path"]).read_bytes() for row in rows])
    for row, answer in zip(rows, answers, strict=True):
        assert row["digest"] == sha256_file(photos / row["path"])
        assert row["version"] == shared.version
        if isinstance(answer, Rejection):
            assert (row["path"], row["error"]) == ("a/broken.png", answer.message)
            assert row["label"] is row["distance"] is row["unknown"] is row["neighbors"] is None
        else:
            assert (row["label"], row["unknown"], row["error"]) == (answer.pred, answer.unknown, None)
            assert row["distance"] == pytest.approx(answer.dist, abs=1e-5)
            assert [n["label"] for n in row["neighbors"]] == [n.label for n in answer.neighbors]
    summary = summarize(parts)
    assert (summary.images, summary.errors, summary.failed) == (IMAGES + 1, 1, ("a/broken.png",))
    assert "Skipped 2 files or folders that are no images" in parts.plan.notes[0]


def test_killed_run_continues_with_the_parts_that_are_missing(
    shared: Shared, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = FileStore(tmp_path / "out")
    parts = plan_predictions(shared, out)
    run_parts(parts, open_worker, index=2, workers=parts.plan.parts)
    written = (out.root / "part-000002.parquet").stat().st_mtime_ns
    monkeypatch.setattr(batch, "open_tree", lambda source: pytest.fail("The source is listed once."))
    again = plan_predictions(shared, out)
    assert again.missing() == [0, 1, 3]
    monkeypatch.undo()
    seen: list[tuple[int, int]] = []
    run_parts(again, open_worker, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert (out.root / "part-000002.parquet").stat().st_mtime_ns == written
    assert files(out.root) == files(predict(shared, tmp_path / "other").store.root)  # pyright: ignore


def test_output_of_another_release_source_or_program_is_not_mixed(shared: Shared, tmp_path: Path) -> None:
    plan_predictions(shared, FileStore(tmp_path / "out"))
    for change in ({"version": "other"}, {"source": "folder:/elsewhere"}):
        with pytest.raises(ConflictError, match=r"has predictions of folder:.* by release .*; choose another --out"):
            plan_predictions(shared.model_copy(update=change), FileStore(tmp_path / "out"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(ConflictError, match="is not empty"):
        plan_predictions(shared, FileStore(tmp_path / "mine"))


def test_source_without_an_image_writes_no_plan(shared: Shared, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    empty = shared.model_copy(update={"source": f"folder:{tmp_path / 'empty'}"})
    with pytest.raises(DataError, match="contains no image"):
        plan_predictions(empty, FileStore(tmp_path / "out"))
    assert not [*FileStore(tmp_path / "out").list("")]


def test_file_that_was_deleted_after_the_listing_has_an_error(shared: Shared, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("keep", "gone"):
        (tmp_path / "in" / f"{name}.png").write_bytes((photos / "a" / "001.png").read_bytes())
    out = FileStore(tmp_path / "out")
    parts = plan_predictions(shared.model_copy(update={"source": f"folder:{tmp_path / 'in'}"}), out)
    (tmp_path / "in" / "gone.png").unlink()
    run_parts(parts, open_worker)
    rows = {row["path"]: row["error"] for row in pq.read_table(out.root).to_pylist()}
    assert rows == {"gone.png": "gone.png cannot be read: No such file or directory.", "keep.png": None}


def test_vectors_that_cannot_be_searched_are_no_fault_of_an_image(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = Rejection(code=503, message="The gallery cannot be searched at the moment.")
    monkeypatch.setattr(Predictor, "predict", lambda self, images: [down] * len(images))
    parts = plan_predictions(shared, FileStore(tmp_path / "out"))
    with pytest.raises(StoreError, match="cannot be searched"):
        run_parts(parts, open_worker)
    assert parts.missing() == [0, 1, 2, 3]
    assert not files(tmp_path / "out")


def test_bucket_gives_the_rows_of_a_folder(shared: Shared, photos: Path, bucket: str, tmp_path: Path) -> None:
    source, out = open_store(f"s3://{bucket}/photos"), open_store(f"s3://{bucket}/out")
    for file in FolderTree(photos).files():
        source.put(file.name, (photos / file.name).read_bytes())
    source.put("notes.txt", b"x" * 100)
    parts = plan_predictions(shared.model_copy(update={"source": source.uri}), out)
    run_parts(parts, open_worker)
    assert parts.plan.notes == (f"Skipped 1 file or folder that is no image in {source.uri}: notes.txt.",)
    rows = []
    for number in range(parts.plan.parts):
        rows += pq.read_table(out.fetch(f"part-{number:06}.parquet", tmp_path / f"{number}.parquet")).to_pylist()
    predict(shared, tmp_path / "local")
    assert sorted(rows, key=str) == sorted(pq.read_table(tmp_path / "local").to_pylist(), key=str)


def test_command_names_what_has_no_prediction(shared: Shared, photos: Path, tmp_path: Path) -> None:
    arguments = ["--source", f"folder:{photos}", "--out", str(tmp_path / "out"), "--store", shared.store_uri, "--json"]
    done = evernear("batch-predict", *arguments, "--part-images", "10", "--processes", "1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["images"] == IMAGES + 1
    assert "24 images in folder:" in done.stderr
    assert "1 image has no prediction; see the column error: a/broken.png." in done.stderr
    assert len(files(tmp_path / "out")) == 3
    assert (tmp_path / "out" / FOLDER / "parts.json").exists()


def test_table_at_a_relative_path_is_predicted_from_any_directory(
    shared: Shared, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [file.name for file in FolderTree(photos).files()]
    table = "\n".join(["path,label", *(f"{name},{number % 2}" for number, name in enumerate(images))])
    copied = shutil.copytree(photos, tmp_path / "photos", symlinks=True)
    (copied / "photos.csv").write_text(table)
    command = ["batch-predict", "--store", shared.store_uri, "--release", shared.version, "--out", tmp_path / "out"]
    monkeypatch.chdir(copied)
    assert evernear(*command, "--source", "table:photos.csv").returncode == 0
    written = files(tmp_path / "out")
    assert pq.read_table(tmp_path / "out").num_rows == len(images)
    monkeypatch.chdir(tmp_path)
    done = evernear(*command, "--source", "photos/photos.csv")
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "out") == written


def test_step_of_the_pipeline_predicts_with_the_champion_and_its_run_ends_as_predicted(
    shared: Shared, photos: Path, tmp_path: Path
) -> None:
    out = (tmp_path / "out").as_uri()
    steps.predict("run-1", shared.store_uri, f"folder:{photos}", out, "", 1)
    assert pq.read_table(tmp_path / "out").num_rows == IMAGES + 1
    steps.notify(
        "run-1", shared.store_uri, "predict", "SUCCEEDED", "", str(tmp_path / "outcome"), str(tmp_path / "page.html")
    )
    outcome = load_outcome(open_store(shared.store_uri), "run-1")
    assert outcome is not None
    assert outcome.summary() == f"predicted: {IMAGES} predictions by release {shared.version} in {out}"
    assert outcome.release is None
    (record,) = [each for each in RunRecord(open_store(shared.store_uri), "run-1").steps() if each.step == "predict"]
    assert record.message.endswith("; 1 image has no prediction; see the column error: a/broken.png")
    assert "Predicted" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (0, "nodes is 0; set a number above 0."),
        (2, "Other nodes cannot reach the images and predictions"),
    ],
)
def test_step_refuses_nodes_before_it_writes(
    shared: Shared, photos: Path, tmp_path: Path, nodes: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        steps.predict("run-3", shared.store_uri, f"folder:{photos}", (tmp_path / "out").as_uri(), "", nodes)
    assert message in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_step_names_the_parameter_that_is_missing(shared: Shared, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        steps.predict("run-4", shared.store_uri, "s3://bucket/images", "", "", 1)
    assert "The parameter out is empty; set it to s3://bucket/prefix." in capfd.readouterr().err
