"""Figures after labels were mended on the console's Mistakes page, compared with the truth:
``python benchmarks/mended_labels.py``.

A folder of scikit-learn's digits gets 5% wrong labels, in one of two ways:

- ``random``: any image, and any other class. A network seldom repeats such an error.
- ``one class``: half of the images of one class, labeled as the next class. A network learns many
  of these errors, and names them "right".

`evernear run` trains a release. A user who knows the truth then goes through the Mistakes page
until it is empty, and corrects each wrong label and keeps each right one. Another run measures
again. The figures of its run page, with and without the corrected images, are compared with the
share of the same test images whose answer is the true class.
"""

import argparse
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from PIL import Image
from starlette.testclient import TestClient

from benchmarks import machine
from evernear.common.run_record import RunRecord
from evernear.common.store import Store, open_store
from evernear.console.access import SignIn
from evernear.console.backend import Backend
from evernear.console.class_page import ClassPage
from evernear.console.runs import LocalRuns
from evernear.console.server import create_console_app
from evernear.data.sources.digits import Digits
from evernear.evaluation.answer_table import ANSWERS_FILE, AnswerTable
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.headline import AnswerCounts
from evernear.reporting.runs import RunList
from evernear.settings import Settings, load

WRONG_SHARE = 0.05
TOKEN = "benchmark"  # noqa: S105 - of a console without a port
_CARD = re.compile(r'name="image" value="(?P<digest>[0-9a-f]{64})".*?labeled <b><bdi>(?P<label>.+?)</bdi>', re.DOTALL)
Kind = Literal["random", "one class"]
Truth = Mapping[int, str]
"""The true class of each image, by the number in its file name."""


class Measured(NamedTuple):
    shown: float
    """Share of test images that are named right, as the run page shows it."""
    without: float
    """The same without the images whose label was corrected."""
    true: float
    """Share of the same test images whose answer is their true class, and not unknown."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=5)
    arguments = parser.parse_args()
    machine_info, runs = machine.describe(), []
    plants: dict[Kind, Callable[[Truth, random.Random], Truth]] = {"random": at_random, "one class": of_one_class}
    for kind, plant in plants.items():
        for seed in range(arguments.draws):
            with tempfile.TemporaryDirectory() as scratch:
                runs.append({"kind": kind, "seed": seed, **mend(Path(scratch), plant, seed)})
            print(runs[-1], flush=True)
    machine.write(
        "mended_labels",
        "Figures after labels were mended on the Mistakes page",
        machine_info,
        {"runs": runs},
        table(runs),
    )


def at_random(truth: Truth, rng: random.Random) -> Truth:
    classes = sorted(set(truth.values()))
    chosen = rng.sample(sorted(truth), round(WRONG_SHARE * len(truth)))
    return {number: rng.choice([each for each in classes if each != truth[number]]) for number in chosen}


def of_one_class(truth: Truth, rng: random.Random) -> Truth:
    classes = sorted(set(truth.values()))
    true = rng.choice(classes)
    of_class = [number for number, label in truth.items() if label == true]
    wrong = classes[(classes.index(true) + 1) % len(classes)]
    return dict.fromkeys(rng.sample(of_class, min(round(WRONG_SHARE * len(truth)), len(of_class) // 2)), wrong)


def mend(scratch: Path, plant: Callable[[Truth, random.Random], Truth], seed: int) -> dict[str, Any]:
    (block,) = Digits().blocks()
    truth = dict(enumerate(block.labels))
    wrong = plant(truth, random.Random(seed))
    for number, image in enumerate(block.images):
        path = scratch / "images" / wrong.get(number, truth[number]) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    settings = load(
        environment={},
        overrides=[
            f"workdir={scratch / 'work'}",
            f"data.source=folder:{scratch / 'images'}",
            f"train.seed={seed}",
            "target=registry",
            "gate.beat_baseline=false",
        ],
    )
    run(settings)
    store = open_store(settings.store_uri)
    backend = Backend(settings, store, LocalRuns(settings, []))
    true_of = {
        digest: truth[int(Path(image.files[0]).name[:4])]
        for label in sorted(set(truth.values()))
        for digest, image in ClassPage(backend).images(label).items()
    }
    before, answers = measured(store, true_of), newest_answers(store)
    corrected, kept = go_through(backend, true_of)
    run(settings)
    return {
        "wrong": len(wrong),
        "wrong_in_test": sum(true_of[digest] != row["label"] for digest, row in answers.items()),
        "corrected": corrected,
        "kept": kept,
        **{f"before_{name}": value for name, value in before._asdict().items()},
        **{f"after_{name}": value for name, value in measured(store, true_of)._asdict().items()},
    }


def run(settings: Settings) -> None:
    words = ["--workdir", str(settings.workdir), "--source", settings.data.source, "--set", "target=registry"]
    words += ["--set", f"train.seed={settings.train.seed}", "--set", "gate.beat_baseline=false"]
    done = subprocess.run([sys.executable, "-m", "evernear", "run", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)


def newest_answers(store: Store) -> Mapping[str, dict[str, Any]]:
    """The newest run's answer to each test image, by its digest."""
    newest = RunList(store).page(0, 1).runs[0].run
    table = AnswerTable(RunRecord(store, newest).get(ANSWERS_FILE) or b"", newest)
    return {row["digest"].hex(): row for row in table.rows.to_pylist()}


def measured(store: Store, true_of: Mapping[str, str]) -> Measured:
    newest = RunList(store).page(0, 1).runs[0].run
    evaluation = RunRecord(store, newest).find("evaluation", Evaluation)
    assert evaluation is not None
    shown, answers = evaluation.candidate.answers, newest_answers(store)
    right = sum(not row["unknown"] and row["answer"] == true_of[digest] for digest, row in answers.items())
    return Measured(named_right(shown), named_right(evaluation.uncorrected or shown), right / len(answers))


def named_right(counts: AnswerCounts) -> float:
    return counts.named_right / counts.images


def go_through(backend: Backend, true_of: Mapping[str, str]) -> tuple[int, int]:
    """Answer for each image on the Mistakes page, until none is left. Return how many labels were
    corrected and kept."""
    client = TestClient(create_console_app(backend, SignIn(backend.settings, TOKEN, "benchmark")))
    client.get(f"/?token={TOKEN}")
    client.headers["X-Evernear-CSRF"] = client.cookies["evernear-csrf"]
    corrected = kept = 0
    while cards := list(_CARD.finditer(client.get("/mistakes").text)):
        for card in cards:
            true = true_of[card["digest"]]
            action = {"action": "keep"} if true == card["label"] else {"action": "label", "label": true}
            client.post("/mistakes", data={"image": card["digest"], **action}).raise_for_status()
            corrected += true != card["label"]
            kept += true == card["label"]
    return corrected, kept


def table(runs: list[dict[str, Any]]) -> list[list[str]]:
    heading = [
        "5% wrong labels",
        "draws",
        "wrong in the test sets",
        "corrected",
        "named right before: shown, true",
        "after: shown",
        "after: shown without corrected images",
        "after: true",
    ]
    return [heading, *(row(kind, [each for each in runs if each["kind"] == kind]) for kind in ("random", "one class"))]


def row(kind: str, runs: list[dict[str, Any]]) -> list[str]:
    def mean(name: str) -> str:
        return f"{statistics.mean(each[name] for each in runs):.1%}"

    return [
        kind,
        str(len(runs)),
        str(sum(each["wrong_in_test"] for each in runs)),
        str(sum(each["corrected"] for each in runs)),
        f"{mean('before_shown')}, {mean('before_true')}",
        *(mean(f"after_{name}") for name in Measured._fields),
    ]


if __name__ == "__main__":
    main()
