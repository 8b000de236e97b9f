"""The evaluation artifact: all that the gate decides by, measured in one run on one frozen test split."""

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile

import numpy as np
from pydantic import Field, SkipValidation

from evernear.data.shards import Dataset
from evernear.disk import write_atomically
from evernear.errors import IntegrityError
from evernear.evaluation.compare import Comparison, compare
from evernear.evaluation.leaks import count_leaks
from evernear.evaluation.measure import Measurement, Outcomes, measure
from evernear.evaluation.open_set import OpenSet
from evernear.frozen import Frozen
from evernear.settings import EvaluationSettings

if TYPE_CHECKING:  # who only reads an evaluation loads neither torch nor FAISS
    from evernear.evaluation.recogniser import Recogniser


EVALUATION_FILE = "evaluation.json"
OUTCOMES_FILE = "outcomes.npz"
SYSTEMS = ("candidate", "champion")


class Evaluation(Frozen, arbitrary_types_allowed=True):
    """Candidate, and champion if there is one, on the same queries."""

    remedy = "run the evaluate step again"

    candidate: Measurement
    champion: Measurement | None
    comparison: Comparison | None
    open_set: OpenSet
    leaks: dict[str, int]
    """Test images in each split that went into the candidate."""
    champion_leaks: dict[str, int] | None
    """The same for the champion; None where there is none, or its dataset was not at hand."""
    champion_test_kept: float | None = None
    """Share of the champion's own test images that are still in the test split; None as above."""
    outcomes: dict[str, SkipValidation[Outcomes]] = Field(default={}, exclude=True, repr=False)
    """By "candidate" and "champion"; kept in `OUTCOMES_FILE`."""

    def metrics(self) -> dict[str, float]:
        """The figures worth a line in a chart, finite ones only."""
        found: dict[str, float | None] = {
            "accuracy": self.candidate.accuracy.value,
            "accuracy_low": self.candidate.accuracy.low,
            "accuracy_high": self.candidate.accuracy.high,
            "recall_at_1": self.candidate.recall_at_1.value,
            "recall_at_5": self.candidate.recall_at_5.value,
            "worst_class_recall": min(recall.value for recall in self.candidate.class_recall.values()),
            "false_reject_rate": self.candidate.false_rejects.value,
            "index_recall": self.candidate.index_recall.value,
            "threshold": self.candidate.threshold,
            "parity_max_abs_difference": self.candidate.parity_max_abs_difference,
            "test_images": self.candidate.accuracy.total,
            "test_images_seen": sum(self.leaks.values()),
        }
        if self.open_set.auroc and self.open_set.false_accepts:
            found["open_set_auroc"] = self.open_set.auroc.value
            found["open_set_false_accept_rate"] = self.open_set.false_accepts.value
        if self.champion and self.comparison:
            pairs = self.comparison.within(self.champion.known_labels)
            found["champion_accuracy"] = self.champion.accuracy.value
            found["regressions"] = pairs.regressions
            found["improvements"] = pairs.improvements
            found["p_worse"] = pairs.p_worse
        return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}

    def write(self, directory: Path) -> None:
        """Write `EVALUATION_FILE` and, beside it, who was right on which query."""
        systems = [self.outcomes[name] for name in SYSTEMS if name in self.outcomes]
        buffer = io.BytesIO()
        np.savez(buffer, labels=systems[0].labels, right=np.stack([system.right for system in systems]))
        write_atomically(directory / OUTCOMES_FILE, buffer.getvalue())
        self.save(directory / EVALUATION_FILE)

    @staticmethod
    def open(directory: Path) -> "Evaluation":
        """What `write` wrote, its counts checked against the queries they count.

        Raises:
            IntegrityError: nothing is there, or the two files contradict each other.
        """
        try:
            evaluation = Evaluation.load(directory / EVALUATION_FILE)
            archive = io.BytesIO((directory / OUTCOMES_FILE).read_bytes())
            with np.load(archive, allow_pickle=False) as columns:
                systems = (Outcomes(right, columns["labels"]) for right in columns["right"])
                outcomes = dict(zip(SYSTEMS, systems, strict=False))
        except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
            raise IntegrityError(f"{directory} holds no evaluation; run the evaluate step again.") from error
        evaluation = evaluation.model_copy(update={"outcomes": outcomes})
        if not evaluation._agrees():
            raise IntegrityError(
                f"The evaluation in {directory} contradicts its own outcomes; run the evaluate step again."
            )
        return evaluation

    def _agrees(self) -> bool:
        """Whether the counts are those of the outcomes."""
        measured = [measurement for measurement in (self.candidate, self.champion) if measurement]
        counts = [(int(system.right.sum()), len(system.right)) for system in self.outcomes.values()]
        return (
            counts == [(each.accuracy.count, each.accuracy.total) for each in measured]
            and _compared(self.outcomes, self.candidate.labels) == self.comparison
        )


def evaluate(
    candidate: "Recogniser",
    champion: "Recogniser | None",
    dataset: Dataset,
    open_set: OpenSet,
    settings: EvaluationSettings,
    champion_dataset: Dataset | None = None,
    trained_on: Dataset | None = None,
) -> Evaluation:
    """Measure ``candidate`` and ``champion`` on the test split of ``dataset``, and count test images seen
    before.

    ``champion_dataset`` is the snapshot the champion was made from, where the store still has it. A champion
    that was trained on test images looks better than it is; the gate says so. ``trained_on`` is the snapshot that
    the candidate's network was trained on (None: ``dataset``).

    Raises:
        DataError: the test split is empty, or of images that one of the two does not take.
    """
    measurements: dict[str, Measurement] = {}
    outcomes: dict[str, Outcomes] = {}
    for name, recogniser in zip(SYSTEMS, (candidate, champion), strict=True):
        if recogniser is not None:
            measurements[name], outcomes[name] = measure(recogniser, dataset, settings)
    return Evaluation(
        candidate=measurements["candidate"],
        champion=measurements.get("champion"),
        comparison=_compared(outcomes, dataset.labels),
        open_set=open_set,
        leaks=_leaks(dataset, trained_on or dataset),
        champion_leaks=count_leaks(dataset, champion_dataset) if champion_dataset else None,
        champion_test_kept=_test_kept(dataset, champion_dataset) if champion_dataset else None,
        outcomes=outcomes,
    )


def _leaks(dataset: Dataset, trained_on: Dataset) -> dict[str, int]:
    leaks = count_leaks(dataset, dataset)
    return leaks if trained_on.digest == dataset.digest else leaks | count_leaks(dataset, trained_on, ("train",))


def _test_kept(dataset: Dataset, champion_dataset: Dataset) -> float:
    """Share of the test images of ``champion_dataset`` that are in the test split of ``dataset``, too."""
    kept = count_leaks(dataset, champion_dataset, ("test",))["test"]
    return kept / max(1, champion_dataset.count("test"))


def _compared(outcomes: dict[str, Outcomes], labels: tuple[str, ...]) -> Comparison | None:
    if "champion" not in outcomes:
        return None
    return compare(outcomes["candidate"], outcomes["champion"], labels)
