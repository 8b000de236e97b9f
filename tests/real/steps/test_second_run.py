"""A second run on the same images repeats no training, export or probe."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from evernear import steps
from evernear.common.run_record import RunRecord
from evernear.common.step_results import REUSED
from evernear.common.store import open_store
from evernear.data.ingest import ingest_source
from evernear.data.manifest import save_manifest
from evernear.embedding import export
from evernear.embedding.clock import Clock
from evernear.evaluation import choice, probe
from evernear.evaluation.open_set import OpenSet
from evernear.settings import DataSettings, RunSettings

TINY = "test_resnet"
"""The smallest convolutional network of timm."""
Tree = dict[str, object]


@pytest.fixture
def run_inputs(tmp_path: Path) -> Path:
    """A dataset of 6 classes of noise, and pretrained weights."""
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(1)
    save_file(timm.create_model(TINY, num_classes=0).state_dict(), tmp_path / "model.safetensors")
    rng = np.random.default_rng(0)
    for label in "abcdef":
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(16):
            pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / label / f"{number}.png")
    settings = DataSettings(source=f"folder:{tmp_path / 'images'}", gallery_fraction=0.2, query_fraction=0.2)
    save_manifest(ingest_source(settings, (tmp_path / "store").as_uri()), tmp_path)
    return tmp_path


def settings_of(images: Path, **changes: object) -> Tree:
    recipe = {
        "backbone": TINY,
        "weights": str(images / "model.safetensors"),
        "backbone_size_px": 16,
        "epochs": 1,
        "min_steps": 40,
    }
    chosen = RunSettings.model_validate({"store": (images / "store").as_uri(), "train": recipe | changes})
    return chosen.model_dump(mode="json", exclude_defaults=True)


def run_steps(images: Path, run: str, settings: Tree) -> dict[str, bytes]:
    """Run the steps that compute most, and return the content of their files."""
    out = images / run
    dataset, trained, network = str(images), str(out / "trained"), str(out / "network")
    steps.train(run, settings, dataset, trained, str(out / "curves.html"))
    steps.export(run, settings, dataset, trained, network)
    steps.probe(run, settings, dataset, str(out / "open_set"))
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def summaries(images: Path, run: str) -> dict[str, str]:
    record = RunRecord(open_store((images / "store").as_uri()), run)
    return {step.step: step.message for step in record.steps() if step.state == "finished"}


class ComputedAgainError(Exception):
    pass


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ComputedAgainError

    monkeypatch.setattr(choice, "train_and_choose", fail)
    monkeypatch.setattr(export, "export_network", fail)
    monkeypatch.setattr(probe, "probe_open_set", fail)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_is_computed_twice_for_the_same_inputs(
    run_inputs: Path, monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    settings = settings_of(run_inputs, frozen=frozen)
    first = run_steps(run_inputs, "first", settings)
    assert not any(REUSED in message for message in summaries(run_inputs, "first").values())
    forbid(monkeypatch)
    assert run_steps(run_inputs, "second", settings) == first
    again = summaries(run_inputs, "second")
    assert set(again) == {"train", "export", "probe"}
    assert all(REUSED in message for message in again.values())
    if frozen:
        require_no_torch(run_inputs, settings)

    with pytest.raises(ComputedAgainError):
        run_steps(run_inputs, "seed", settings_of(run_inputs, frozen=frozen, seed=1))
    weights = run_inputs / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(ComputedAgainError):  # another file of the same name
        run_steps(run_inputs, "weights", settings)


def require_no_torch(images: Path, settings: Tree) -> None:
    """Steps that reuse a result do not load torch, which takes seconds."""
    script = f"""
import json, sys
from evernear import steps
settings = json.loads(sys.argv[1])
steps.train("third", settings, {str(images)!r}, {str(images / "t")!r}, {str(images / "c.html")!r})
steps.export("third", settings, {str(images)!r}, {str(images / "t")!r}, {str(images / "n")!r})
steps.probe("third", settings, {str(images)!r}, {str(images / "o")!r})
print({{"torch", "timm", "scipy"}} & set(sys.modules))
"""
    command = [sys.executable, "-c", script, json.dumps(settings)]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert completed.stdout.splitlines()[-1] == "set()"


@pytest.mark.slow
def test_the_probe_trains_a_head_on_as_many_views_as_the_training_had_time_for(
    run_inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[object] = []

    def probe_with(*arguments: object) -> OpenSet:
        probed.append(arguments[-1])
        return OpenSet(held_out=())

    monkeypatch.setattr(probe, "probe_open_set", probe_with)
    monkeypatch.setattr(choice, "prefer", lambda _: "head")
    monkeypatch.setattr(steps, "Clock", lambda: Clock(lambda: 0.0))
    for run, end_of_views in (("all", 2.0), ("none", 0.0)):
        monkeypatch.setattr("evernear.embedding.head.VIEWS_SHARE", end_of_views)
        settings = settings_of(run_inputs, minutes=2.0, epochs=None, min_steps=None, layers="head", seed=len(probed))
        steps.train(run, settings, str(run_inputs), str(run_inputs / run), str(run_inputs / "curves.html"))
        steps.probe(run, settings, str(run_inputs), str(run_inputs / "open_set"))
    assert probed == [4, 0]
