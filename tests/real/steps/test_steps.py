"""Behavior of the steps beyond the functions that they call."""

import base64
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from evernear import steps
from evernear.common import progress
from evernear.common.progress import step
from evernear.common.run_record import RunRecord
from evernear.common.store import open_store
from evernear.data.ingest import ingest_source
from evernear.data.manifest import save_manifest
from evernear.errors import TrainingError
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.open_set import OpenSet
from evernear.evaluation.verdict import Verdict
from evernear.kubeflow.publish import compile_pipelines
from evernear.release.registry import Registry
from evernear.reporting.notify import finalize
from evernear.reporting.page import run_page
from evernear.serving.decoding import encode_png
from evernear.serving.query_log_files import LoggedQuery, Period
from evernear.settings import DataSettings, OneRun, PipelineSettings, RunSettings, TrainSettings, of_run, parse
from evernear.settings.train import WEIGHTS_OF_PHOTOGRAPHS
from tests.releases import MakeRelease, System


def ingest_noise(directory: Path, labels: str) -> None:
    """Ingest random 12 x 12 images, one class per character of ``labels``; write the manifest to
    ``directory``."""
    rng = np.random.default_rng(0)
    for label in labels:
        (directory / "images" / label).mkdir(parents=True)
        for number in range(30):
            pixels = rng.integers(0, 256, (12, 12), dtype=np.uint8)
            Image.fromarray(pixels).save(directory / "images" / label / f"{number}.png")
    settings = DataSettings(source=f"folder:{directory / 'images'}", gallery_fraction=0.2, query_fraction=0.2)
    save_manifest(ingest_source(settings, (directory / "store").as_uri()), directory)


def test_validate_rejects_a_champion_with_another_image_size(
    tmp_path: Path, make_release: MakeRelease, capsys: pytest.CaptureFixture[str]
) -> None:
    ingest_noise(tmp_path, "0123456789")
    store = open_store((tmp_path / "store").as_uri())
    release = make_release()
    Registry(store).publish(release.archive)
    settings = RunSettings(store=store.uri).model_dump(mode="json")
    steps.validate("run", settings, str(tmp_path), str(tmp_path / "report.md"))

    Registry(store).set_champion(release.version, None)
    with pytest.raises(SystemExit) as stopped:
        steps.validate("run", settings, str(tmp_path), str(tmp_path / "report.md"))
    assert stopped.value.code == 3
    assert f"{release.version} takes images of (8, 8, 1)" in capsys.readouterr().err


def test_reindex_requires_a_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ingest_noise(tmp_path, "01")
    settings = RunSettings(store=(tmp_path / "store").as_uri()).model_dump(mode="json")
    with pytest.raises(SystemExit) as stopped:
        steps.reuse("run", settings, str(tmp_path), str(tmp_path / "network"), str(tmp_path / "open-set.json"))
    assert stopped.value.code == 4
    assert "run `evernear run` first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size_px", "train", "installed", "weights"),
    [
        (64, {}, True, WEIGHTS_OF_PHOTOGRAPHS),
        (64, {"minutes": 3, "seed": 1}, True, WEIGHTS_OF_PHOTOGRAPHS),
        (64, {"backbone": "compact"}, True, ""),
        (64, {"epochs": 2}, True, ""),
        (64, {}, False, ""),
        (63, {}, True, ""),
    ],
)
def test_ingest_chooses_installed_weights_for_photographs_and_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    size_px: int,
    train: dict[str, object],
    installed: bool,
    weights: str,
) -> None:
    monkeypatch.setattr("evernear.embedding.packaged_weights.is_installed", lambda _: installed)
    for label in "ab":
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(10):
            image = Image.new("RGB", (size_px, size_px), (number, 200, 30 * "ab".index(label)))
            image.save(tmp_path / "images" / label / f"{number}.png")
    store, source = (tmp_path / "store").as_uri(), f"folder:{tmp_path / 'images'}"
    parameters = {"source": source, "target": "registry", "serving_image": ""}
    _, chosen = steps.ingest("run", store, parameters, {"train": train}, str(tmp_path / "dataset"))
    assert parse(OneRun, chosen).train == TrainSettings.model_validate(train | {"weights": weights})
    said = f"train.weights={WEIGHTS_OF_PHOTOGRAPHS}" in capsys.readouterr().out
    assert said is bool(weights)


REPORT = r"epoch (\d)/2, step (\d)/3, about \d+ s left"


def test_train_and_probe_report_progress_and_training_fails_if_the_network_learned_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ingest_noise(tmp_path, "0123")
    monkeypatch.setattr(progress, "REPORT_INTERVAL_S", 0.0)
    monkeypatch.setattr(progress, "REPORTS", 10**9)
    train = {"epochs": 2, "min_steps": 6, "width": 4, "embedding_dim": 8}
    sections = {"train": train, "evaluation": {"probe_epochs": 2}}
    settings = RunSettings(store=(tmp_path / "store").as_uri(), **sections).model_dump(mode="json")
    with pytest.raises(SystemExit) as stopped:
        steps.train("run", settings, str(tmp_path), str(tmp_path / "trained"), str(tmp_path / "curves.html"))
    assert stopped.value.code == TrainingError.exit_code
    assert (tmp_path / "curves.html").is_file()
    output = capsys.readouterr()
    assert "The network learned nothing" in output.err
    reported = [("1", "2"), ("1", "3"), ("2", "1"), ("2", "2"), ("2", "3")]
    assert re.findall(REPORT, output.out) == reported

    steps.probe("run", settings, str(tmp_path), str(tmp_path / "open-set.json"))
    counted = re.findall(r"progress: step (\d)/6, about \d+ s left", capsys.readouterr().out)
    assert counted == ["2", "3", "4", "5", "6"]


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (lambda: os.write(os.open("/dev/full", os.O_WRONLY), b"x"), "The disk that holds /scratch is full; free some"),
        (tempfile.mkdtemp, "No usable temporary directory found in ['/proc']: full or read-only; free some space, or"),
    ],
)
def test_unexpected_disk_errors_are_reported_without_traceback(
    fail: Callable[[], object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TMPDIR", "/scratch")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    with pytest.raises(SystemExit) as stopped, step("index", "run", tmp_path.as_uri()):
        fail()
    assert stopped.value.code == 4
    assert f"evernear: {message}" in capsys.readouterr().err


def test_probe_needs_more_than_two_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ingest_noise(tmp_path, "ab")
    settings = RunSettings(workdir=tmp_path).model_dump(mode="json")
    steps.probe("run", settings, str(tmp_path), str(tmp_path / "open-set.json"))
    assert (tmp_path / "open-set.json").is_file()
    assert "too few classes to hold one out" in "".join(capsys.readouterr())


def run_ingest(tmp_path: Path, **parameters: str) -> int:
    """The exit code of `ingest_source` with ``parameters``."""
    chosen = {"source": "digits", "preset": "", "target": "kubernetes", "serving_image": ""} | parameters
    claim = {"kubernetes": {"store_claim": "store"}}
    with pytest.raises(SystemExit) as stopped:
        steps.ingest("run", (tmp_path / "store").as_uri(), chosen, claim, str(tmp_path / "dataset"))
    assert not (tmp_path / "store" / "datasets").exists(), "no image was decoded"
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def test_ingest_passes_on_only_the_settings_that_differ_from_the_defaults(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    parameters = {"source": "digits", "preset": "best", "target": "registry", "serving_image": ""}
    changed = {"train": {"seed": 1, "margin": 0.3}, "classes": {"renamed": {"7": "seven"}}}
    _, settings = steps.ingest("run", store, parameters, changed, str(tmp_path / "dataset"))
    chosen = of_run(changed, **parameters, store=store)
    assert parse(OneRun, settings) == chosen
    assert settings["classes"] == {"renamed": {"7": "seven"}}
    assert "margin" not in settings["train"], "0.3 is the default"
    assert len(json.dumps(settings)) < 1000
    recorded = RunRecord(open_store(store), "run").load("settings")
    assert recorded == chosen.model_dump(mode="json"), "the run page lists all of them"


def test_empty_parameter_is_the_uploaded_default_or_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a cleared field of a run's form is; never the images of the demo."""
    for number in range(40):
        (tmp_path / "images" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 200, 30)).save(tmp_path / "images" / "ab"[number % 2] / f"{number}.png")
    source, store = f"folder:{tmp_path / 'images'}", (tmp_path / "store").as_uri()
    cleared = dict.fromkeys(("source", "preset", "target", "serving_image"), "") | {"train_accelerators": "0"}
    with pytest.raises(SystemExit) as stopped:
        steps.ingest("run", store, cleared | {"target": "registry"}, {}, str(tmp_path / "dataset"))
    assert stopped.value.code == 2
    assert "The parameter source is empty; set it to s3://" in capsys.readouterr().err
    assert not (tmp_path / "store" / "datasets").exists()

    image, defaults = "train@sha256:" + 64 * "a", [f"source={source}", f"store={store}", "preset=quick", "train.seed=7"]
    compiled = compile_pipelines(["continuous-training"], image, defaults, PipelineSettings())
    spec = next(yaml.safe_load_all(compiled["continuous-training"]))
    variables = spec["deploymentSpec"]["executors"]["exec-ingest"]["container"]["env"]
    monkeypatch.setenv(*next(tuple(each.values()) for each in variables if each["name"].endswith("DEFAULTS")))
    _, settings = steps.ingest("run", "", cleared, {}, str(tmp_path / "dataset"))
    chosen, quick = parse(OneRun, settings), of_run({}, preset="quick")
    assert (chosen.data.source, chosen.store, chosen.target) == (source, store, "registry")
    assert (chosen.train.seed, chosen.train.epochs) == (7, quick.train.epochs)
    _, settings = steps.ingest("run", store, cleared | {"preset": "fast"}, {"train": {"seed": 8}}, str(tmp_path / "d2"))
    assert parse(OneRun, settings).train.seed == 8, "what is sent counts"


def test_number_of_accelerators_is_checked_by_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in ("", "two", "-1"):
        assert run_ingest(tmp_path, target="registry", train_accelerators=number) == 2
        assert f"train_accelerators = {number!r} is not a number of GPUs" in capsys.readouterr().err


def test_ingest_rejects_a_run_that_cannot_deploy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    assert run_ingest(tmp_path) == 2
    assert "kubernetes.image" in capsys.readouterr().err
    assert run_ingest(tmp_path, serving_image="registry.example/serve@sha256:" + 64 * "a") == 4
    assert run_ingest(tmp_path, preset="frozen", target="registry") == 2
    assert "requires train.weights" in capsys.readouterr().err
    assert run_ingest(tmp_path, preset="bset", target="registry") == 2
    (record,) = RunRecord(open_store((tmp_path / "store").as_uri()), "run").steps()
    assert (record.step, record.state) == ("ingest", "failed")
    assert "No preset 'bset'" in record.message


def test_steps_that_embed_nothing_start_without_torch_and_scipy() -> None:
    modules = ("index.build", "evaluation.evaluate", "evaluation.gate", "reporting.page", "deployment")
    modules += ("release.champion", "serving.live_queries", "embedding.packaged_weights", "kubeflow.local_pipeline")
    script = "".join(f"import evernear.{module}\n" for module in modules)
    script += "from evernear.data.sources.digits import Digits\nDigits()\n"
    script += "import sys; print({'torch', 'scipy', 'sklearn', 'kubernetes'} & set(sys.modules))"
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert completed.stdout == "set()\n"


def test_ingest_reports_a_missing_directory_before_a_busy_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        settings = {"workdir": str(tmp_path), "serving": {"inference_port": port}}
        parameters = {"source": f"folder:{tmp_path}/absent", "target": "local"}
        for source, exit_code, message in (
            (f"folder:{tmp_path}/absent", 3, "The image directory"),
            ("digits", 4, f"In use on 127.0.0.1: port {port} by another program"),
        ):
            with pytest.raises(SystemExit) as stopped:
                steps.ingest("run", (tmp_path / "store").as_uri(), parameters | {"source": source}, settings, "unused")
            assert stopped.value.code == exit_code
            assert message in capsys.readouterr().err
    assert not (tmp_path / "store" / "datasets").exists(), "no image was decoded"


def test_validate_names_its_findings_in_its_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "notes.txt").write_text("notes")
    ingest_noise(tmp_path, "01")
    settings = RunSettings(store=(tmp_path / "store").as_uri())
    arguments = (str(tmp_path), str(tmp_path / "report.md"))
    steps.validate("run", settings.model_dump(mode="json"), *arguments)
    shown = capsys.readouterr().out
    assert "note: 1 file is not an image of a class and was left out: notes.txt.\n" in shown
    assert "finished: no problems\n" in shown

    strict = {"min_class_images": 40, "warn": ["tiny_class"]}
    settings = RunSettings(store=settings.store, validation=strict)
    steps.validate("run", settings.model_dump(mode="json"), *arguments)
    summary = (
        "finished: 1 finding: Classes need 40 images, but these have fewer: 0 (30), 1 (30); add images or remove the"
        " classes."
    )
    assert summary in capsys.readouterr().out


def test_evaluate_replays_stored_queries_and_the_run_page_shows_changed_answers(
    tmp_path: Path, system: System, make_release: MakeRelease
) -> None:
    store, release = open_store((tmp_path / "store").as_uri()), make_release()
    Registry(store).publish(release.archive)
    Registry(store).set_champion(release.version, None)
    images = np.concatenate([block.images for block in system.dataset.blocks("gallery")])[:80]
    at = datetime.now(UTC)
    lines = [Period(version=release.version, since=at, until=at, queries=len(images), unknown=0).model_dump_json()]
    for image in images:  # the log says that the champion answered 0 to all
        logged = base64.b64encode(encode_png(image)).decode()
        lines.append(LoggedQuery(at=at, pred="0", dist=0.1, unknown=False, file=logged).model_dump_json())
    store.put(f"queries/{at:%Y%m%d}/{at:%Y%m%dT%H%M%SZ}-v-host-1-0.jsonl", "\n".join(lines).encode())
    OpenSet(held_out=()).save(tmp_path / "open-set.json")
    save_manifest(system.dataset.manifest, tmp_path / "dataset")
    settings = RunSettings(store=store.uri).model_dump(mode="json")
    steps.evaluate(
        "run",
        settings,
        str(tmp_path / "dataset"),
        str(system.network_dir),
        str(system.index_dir),
        str(tmp_path / "open-set.json"),
        str(tmp_path / "evaluation"),
    )
    replay = Evaluation.open(tmp_path / "evaluation").replay
    assert replay
    assert replay.changed >= 50
    assert not steps.gate("run", settings, str(tmp_path / "evaluation"), str(tmp_path / "verdict.json"))
    record = RunRecord(store, "run")
    verdict = Verdict.load(tmp_path / "verdict.json")
    assert [rule.name for rule in verdict.rules if not rule.passed] == ["same_test_set"], "replay is information"
    finalize(record, "continuous-training", "SUCCEEDED", "", ("run",))
    html = run_page(record)
    assert f"The candidate answered the newest {replay.queries} stored queries" in html
    rows = html.partition('<table class="replayed">')[2].partition("</table>")[0]
    assert rows.count("<tr><td>") == min(24, replay.changed)
    assert "<td>0 at 0.10</td>" in rows
