"""Everything that a run recorded, for the run page (`evernear.reporting.page`) and for
integrations."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

from evernear.common.output import named
from evernear.common.parts import STEPS_IN_PARTS, PartsRecord
from evernear.common.progress import duration
from evernear.common.run_record import EXIT_STEP, LEFT_OUT_FILE, RunRecord, StepRecord
from evernear.common.store import Store
from evernear.data.near_duplicates import NearDuplicatePair, NearDuplicatePairs
from evernear.data.validate import Report
from evernear.embedding.candidate import Candidate
from evernear.errors import MissingObjectError, StoreError
from evernear.evaluation.evaluate import Evaluation
from evernear.evaluation.examples import Examples, ReplayExamples
from evernear.evaluation.headline import AnswerCounts, headline
from evernear.evaluation.measure import Measurement
from evernear.evaluation.statistics import Interval, Proportion
from evernear.evaluation.verdict import Verdict
from evernear.release.manifest import is_version
from evernear.release.records import Record
from evernear.release.registry import Registry
from evernear.reporting.notify import RunOutcome
from evernear.settings import CostSettings, OneRun
from evernear.settings.sources import flat

CONFUSION_LABELS_MAX = 30
KEY_RULES = ("no_worse", "beats_baselines", "no_worse_than_anchor", "accuracy_floor")
"""The most informative rules for a promoted candidate."""


Share: TypeAlias = Proportion | Interval


class Figure(NamedTuple):
    """A proportion of the candidate, the champion and the anchor, or of the candidates of two
    runs."""

    name: str
    candidate: Share | None
    champion: Share | None
    anchor: Share | None = None

    def position(self, value: float) -> float:
        """In percent, between the lowest and the highest end of all intervals."""
        shares = [share for share in (self.candidate, self.champion, self.anchor) if share]
        low, high = min(share.low for share in shares), max(share.high for share in shares)
        return 100 * (value - low) / max(high - low, 1e-9)


class ClassRow(NamedTuple):
    """The figures for one class. Image counts include all splits."""

    label: str
    images: int
    before: int | None
    answers: AnswerCounts | None
    named_right: Proportion | None
    label_right: Proportion | None
    champion: Proportion | None
    """Label right."""
    regressions: int
    improvements: int


@dataclass(frozen=True)
class RunReport:
    """All records of a run. The record of a step that it did not reach is None."""

    outcome: RunOutcome
    steps: tuple[StepRecord, ...]
    verdict: Verdict | None
    evaluation: Evaluation | None
    examples: Examples | None
    replayed: ReplayExamples | None
    validation: Report | None
    near_duplicates: tuple[NearDuplicatePair, ...]
    left_out: str
    """The file beside the page that names all files that were left out, or empty."""
    training: Mapping[str, Any]
    settings: Mapping[str, Any]
    lineage: Mapping[str, str]
    nodes: Mapping[str, PartsRecord]
    """Keyed by step."""

    @staticmethod
    def load(record: RunRecord) -> "RunReport":
        """Read the record of a run that has ended."""
        outcome = record.find("outcome", RunOutcome)
        if outcome is None:
            raise MissingObjectError(f"{record.store.uri} has no outcome of a run {record.run}; it may not have ended.")
        evaluation = record.find("evaluation", Evaluation)
        near_duplicates = record.find("near_duplicates", NearDuplicatePairs)
        return RunReport(
            outcome=outcome,
            steps=tuple(step for step in record.steps() if step.step != EXIT_STEP or step.ended),
            verdict=record.find("verdict", Verdict),
            evaluation=evaluation,
            examples=record.find("examples", Examples),
            replayed=record.find("replay", ReplayExamples),
            validation=record.find("validation", Report),
            near_duplicates=near_duplicates.pairs if near_duplicates else (),
            left_out=LEFT_OUT_FILE if record.has(LEFT_OUT_FILE) else "",
            training=record.load("training"),
            settings=flat(record.load("settings")),
            lineage=_lineage(record.store, outcome, evaluation),
            nodes={name: ran for name in STEPS_IN_PARTS if (ran := record.find(f"parts_{name}", PartsRecord))},
        )

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(map(Candidate.model_validate, self.training.get("candidates", ())))

    def facts(self) -> dict[str, str]:
        """The outcome and the lineage, keyed by names without spaces."""
        facts = {"state": self.outcome.state, "summary": self.outcome.summary()} | dict(self.lineage)
        return {key.replace(" (sha256)", "_sha256").replace(" ", "_"): value for key, value in facts.items()}

    @property
    def title(self) -> str:
        outcome = self.outcome
        match outcome.state:
            case "promoted":  # the page outlives the promotion
                return f"Release {outcome.release} was promoted"
            case "rolled back":
                return f"Release {outcome.release} was restored"
            case "held":
                return f"Release {outcome.candidate} is not promoted"
            case _:
                return f"{outcome.state.capitalize()}{f' at {outcome.step}' if outcome.step else ''}"

    @property
    def liveness(self) -> str:
        """Whether the release that the run made was live when the run ended, as a sentence."""
        outcome = self.outcome
        if outcome.state == "promoted":
            return "The release was live when the run ended."
        return "The release was not live when the run ended." if outcome.candidate else "The run made no release."

    @property
    def untested(self) -> str:
        """The classes that the candidate knows and that have no test image."""
        if self.evaluation is None:
            return ""
        candidate = self.evaluation.candidate
        return named([label for label in candidate.known_labels if label not in candidate.class_label_right])

    @property
    def map_wrong(self) -> int:
        """How many images on the map are named wrong."""
        points = self.examples.map if self.examples else ()
        return sum(not point.unknown and point.predicted != point.label for point in points)

    @property
    def headline(self) -> str:
        return headline(self.evaluation.metrics() if self.evaluation else self.outcome.metrics)

    @property
    def reasons(self) -> list[str]:
        """The most important reasons: for a promoted candidate, those of the rules in
        `KEY_RULES`."""
        if self.outcome.state == "promoted" and self.verdict:
            by_rule = {rule.name: rule.reason for rule in self.verdict.rules}
            reasons = [by_rule[name] for name in KEY_RULES if name in by_rule]
            return [reason for reason in reasons if reason != self.outcome.caution]  # the page shows it as a warning
        return [*self.outcome.reasons]

    @property
    def figures(self) -> list[Figure]:
        if self.evaluation is None:
            return []
        candidate, champion = self.evaluation.candidate, self.evaluation.champion
        anchor = self.evaluation.anchor.measurement if self.evaluation.anchor else None
        systems = [_figures(system) if system else {} for system in (candidate, champion, anchor)]
        figures = [Figure(name, *(figures.get(name) for figures in systems)) for name in systems[0]]
        figures.append(
            Figure("unseen classes accepted", self.evaluation.false_accepts, self.evaluation.champion_false_accepts)
        )
        return [figure for figure in figures if figure.candidate or figure.champion]

    @property
    def prices(self) -> CostSettings:
        names = CostSettings.model_fields
        recorded = {name: self.settings[f"cost.{name}"] for name in names if f"cost.{name}" in self.settings}
        return CostSettings(**recorded)

    @property
    def costs(self) -> list[float | None]:
        """For each step, its cost including the nodes that ran its parts, or None if unknown."""
        nodes = self.settings.get("train.nodes", 1)  # a TrainJob's pods are not the step's
        own = [None if step.step == "train" and nodes > 1 else cost(step, self.prices) for step in self.steps]
        parts = [self.cost_of_nodes(step.step) if step.step in self.nodes else 0.0 for step in self.steps]
        return [None if a is None or b is None else a + b for a, b in zip(own, parts, strict=True)]

    def cost_of_nodes(self, step: str) -> float | None:
        return cost_of_nodes(self.nodes[step], self.prices)

    @property
    def total_cost(self) -> float | None:
        """None if the cost of a step is unknown."""
        known = [each for each in self.costs if each is not None]
        return sum(known) if len(known) == len(self.steps) else None

    @property
    def started(self) -> datetime:
        return self.steps[0].started

    @property
    def ended(self) -> datetime | None:
        return max((step.ended for step in self.steps if step.ended), default=None)

    @property
    def duration(self) -> str:
        return duration((self.ended - self.started).total_seconds()) if self.ended else ""

    def classes(self) -> list[ClassRow]:
        """All classes, with the lowest share of images named right first."""
        measured = self.evaluation
        counts = _class_counts(self.validation)
        before = self.examples.images_before if self.examples else None
        labels: list[str] = [*counts, *(before or {}), *(measured.candidate.class_label_right if measured else {})]
        pairs = measured.comparison.classes if measured and measured.comparison else {}
        champion = measured.champion.class_label_right if measured and measured.champion else {}
        answers = measured.candidate.class_answers if measured else {}
        rows = [
            ClassRow(
                label=label,
                images=counts.get(label, 0),
                before=before.get(label, 0) if before is not None else None,
                answers=answers.get(label),
                named_right=measured.candidate.share(answers[label].named_right, label)
                if measured and label in answers
                else None,
                label_right=measured.candidate.class_label_right.get(label) if measured else None,
                champion=champion.get(label),
                regressions=pairs[label].regressions if label in pairs else 0,
                improvements=pairs[label].improvements if label in pairs else 0,
            )
            for label in dict.fromkeys(labels)
        ]
        return sorted(rows, key=lambda row: row.named_right.value if row.named_right else 2.0)

    def confusion(self) -> tuple[list[str], list[list[int]]]:
        """The confusion matrix of the most confused classes (`Measurement.confusion_matrix`)."""
        assert self.evaluation is not None  # noqa: S101 - the template asks only then
        return self.evaluation.candidate.confusion_matrix(CONFUSION_LABELS_MAX)

    def changed_settings(self) -> list[tuple[str, Any, bool]]:
        """Whether each setting differs from its default."""
        defaults = flat(OneRun().model_dump(mode="json"))
        return [(key, value, value != defaults.get(key)) for key, value in self.settings.items()]


def _figures(system: Measurement) -> dict[str, Proportion | None]:
    answers = system.answers
    return {
        "named right": system.share(answers.named_right),
        "named wrong": system.share(answers.named_wrong),
        "called unknown": system.share(answers.called_unknown),
        "label right": system.label_right,
        "recall@5": system.recall_at_5,
        "known called unknown": system.false_rejects,
        "index recall": system.index_recall,
    }


def find_run(store: Store, name: str) -> RunRecord:
    """The record of the run ``name``, or of the run that built the release ``name``."""
    if not is_version(name):
        return RunRecord(store, name)
    for info in store.list("runs/"):
        _, run, *rest = info.key.split("/")
        if rest == ["archived.json"] and RunRecord(store, run).load("archived").get("version") == name:
            return RunRecord(store, run)
    raise StoreError(f"{store.uri} has no record of the run that made release {name}.")


def _lineage(store: Store, outcome: RunOutcome, evaluation: Evaluation | None) -> dict[str, str]:
    lineage = {"run": outcome.run, "pipeline": outcome.pipeline, "store": store.uri}
    if evaluation:
        candidate = evaluation.candidate
        lineage |= {
            "dataset": candidate.dataset_digest,
            "network (sha256)": candidate.network_sha256,
            "index": candidate.index_digest,
            "champion": evaluation.champion.name if evaluation.champion else "none",
            "anchor": evaluation.anchor.name if evaluation.anchor else "",
        }
    if outcome.candidate:
        with suppress(StoreError):  # not published, for example after a failed deployment
            lineage |= _release_lineage(Registry(store).get(outcome.candidate, include_pruned=True))
    return {name: value for name, value in lineage.items() if value}


def _release_lineage(release: Record) -> dict[str, str]:
    manifest = release.manifest
    return {
        "release": manifest.version,
        "archive (sha256)": release.archive_sha256,
        "dataset name": manifest.dataset_name,
        "source": manifest.source,
        "backbone": manifest.backbone,
        "network answers with": manifest.engine,
        "pretrained weights (sha256)": manifest.pretrained_sha256 or "",
        "evernear": manifest.evernear_version,
        "git commit": manifest.git_commit,
    }


def _class_counts(validation: Report | None) -> dict[str, int]:
    return dict(sum(map(Counter, validation.counts.values()), Counter[str]())) if validation else {}


HOUR_S = 3600
GIB_BYTES = 2**30


def cost(step: StepRecord, prices: CostSettings) -> float | None:
    """In the currency of ``prices``, or None if the cost is unknown. A container with limits is
    charged for all CPUs and memory up to them for the duration of the step. Without a CPU limit,
    the CPU time is charged, and without a memory limit, the peak memory for this duration."""
    if step.ended is None or not step.cpu_s or (step.gpus and not prices.gpu_hour):
        return None
    hours = (step.ended - step.started).total_seconds() / HOUR_S
    cpu_hours = step.cpu_s / HOUR_S if step.cpu_limit is None else step.cpu_limit * hours
    memory_gib = (step.memory_limit_bytes or step.peak_memory_bytes) / GIB_BYTES
    return cpu_hours * prices.cpu_hour + hours * (memory_gib * prices.memory_gib_hour + step.gpus * prices.gpu_hour)


def cost_of_nodes(ran: PartsRecord, prices: CostSettings) -> float | None:
    """The cost of the pods that ran parts, for their duration, or None if a pod has no limits."""
    if ran.cpus is None or ran.memory_bytes is None:
        return None
    per_hour = ran.cpus * prices.cpu_hour + ran.memory_bytes / GIB_BYTES * prices.memory_gib_hour
    return ran.parts_s / HOUR_S * per_hour
