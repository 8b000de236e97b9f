"""The gate's verdict. Neither torch nor FAISS is imported to read a verdict."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from evernear.common.disk import sha256_bytes
from evernear.common.frozen import Document, Frozen
from evernear.common.output import named
from evernear.errors import IntegrityError


class Rule(Frozen):
    """``reason`` is a sentence, both for a passed and for a failed rule."""

    name: str
    passed: bool
    candidate: float | None = None
    champion: float | None = None
    bound: float | None = None
    reason: str
    could_fail: bool = True
    """False if this data is too little to tell."""
    setting: str = ""
    """The setting ``key=value`` with which a failed rule would pass. Empty if no setting should do
    that."""

    @property
    def result(self) -> str:
        return ("passed" if self.passed else "failed") if self.could_fail else "too few to tell"


class System(Frozen):
    """The network and the index that were measured, identified by their hashes."""

    name: str
    network_sha256: str
    index_digest: str


class AnchorChoice(Frozen):
    """The release with which the candidate is compared in addition to the champion. See
    `evernear.evaluation.gate_anchor`."""

    version: str
    former: str = ""
    """The previous anchor, if it can no longer be compared with the candidate. A promotion of the
    candidate then makes ``version`` the anchor."""
    why: str = ""
    """Why ``former`` cannot be compared, as a sentence."""


class Verdict(Document):
    remedy = "run the gate step again"
    promote: bool
    reasons: list[str]
    """Reasons of the failed rules, or of all rules if none failed. Those that could not fail on
    this data come first."""
    rules: list[Rule]
    candidate: System
    champion: System | None
    dataset_digest: str
    anchor: AnchorChoice | None = None
    """None if no champion exists."""
    detectable_loss: float | None = None
    """The smallest loss of right labels, between 0 and 1, that the gate detects with a probability
    of 90%. None if there is no champion, or nothing to compare."""
    caution: str = ""
    """Sentences about the loss that an automatic promotion may leave undetected, or about a first
    release without evidence. Empty if the test split is large enough."""
    digest: str
    """sha256 of all other fields."""

    @staticmethod
    def of(
        rules: Iterable[Rule],
        candidate: System,
        champion: System | None,
        dataset_digest: str,
        anchor: AnchorChoice | None = None,
        detectable_loss: float | None = None,
        caution: str = "",
    ) -> "Verdict":
        """The verdict is to promote if there is at least one rule and all rules passed."""
        rules = list(rules)
        promote = _all_passed(rules)
        by_weight = sorted(rules, key=lambda rule: rule.could_fail)
        verdict = Verdict(
            promote=promote,
            reasons=[rule.reason for rule in by_weight if promote or not rule.passed],
            rules=rules,
            candidate=candidate,
            champion=champion,
            dataset_digest=dataset_digest,
            anchor=anchor,
            detectable_loss=detectable_loss,
            caution=caution,
            digest="",
        )
        return verdict.model_copy(update={"digest": _digest(verdict)})

    def summary(self) -> str:
        failed = [rule.name for rule in self.rules if not rule.passed]
        vacuous = [rule.name for rule in self.rules if not rule.could_fail]
        if self.promote and vacuous:
            return f"promote: too few images to tell for {named(vacuous)}, the other rules passed"
        if self.promote:
            return f"promote: all {len(self.rules)} rules passed"
        return f"hold: {len(failed)} of {len(self.rules)} rules failed ({', '.join(failed)})"

    @classmethod
    def from_json(cls, data: bytes | str, source: Path | str, remedy: str | None = None) -> Self:
        """Parse a stored verdict, and check that it is consistent.

        Raises:
            IntegrityError: the verdict is invalid or was changed, or it promotes the candidate
                although a rule failed.
        """
        verdict = super().from_json(data, source, remedy)
        if verdict.digest != _digest(verdict) or verdict.promote != _all_passed(verdict.rules):
            raise IntegrityError(f"The verdict {source} was changed after the gate; {cls.remedy}.")
        return verdict


def _all_passed(rules: Iterable[Rule]) -> bool:
    passed = [rule.passed for rule in rules]
    return bool(passed) and all(passed)


def _digest(verdict: Verdict) -> str:
    return sha256_bytes(verdict.model_dump_json(exclude={"digest"}).encode())


def floor_setting(key: str, value: float) -> str:
    """An assignment that sets the floor ``key`` so that ``value`` reaches it, rounded to
    hundredths. Empty if ``value`` is not finite."""
    return f"{key}={math.floor(value * 100) / 100:g}" if math.isfinite(value) else ""


def ceiling_setting(key: str, value: float) -> str:
    """An assignment that sets the ceiling ``key`` so that ``value`` does not exceed it, rounded to
    hundredths. Empty if ``value`` is not finite."""
    return f"{key}={math.ceil(value * 100) / 100:g}" if math.isfinite(value) else ""


def classes_tested(metrics: Mapping[str, float]) -> str:
    """For example "8 of 10 classes tested". Empty if every class was tested, or without such
    counts."""
    classes = int(metrics.get("classes", 0))
    tested = int(metrics.get("tested_classes", classes))
    return f"{tested:,} of {classes:,} classes tested" if tested < classes else ""
