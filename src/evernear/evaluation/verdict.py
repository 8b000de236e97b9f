"""The verdict of the gate. This module imports nothing heavy, for those who only read a verdict."""

from collections.abc import Iterable
from pathlib import Path
from typing import Self

from evernear.disk import sha256_bytes
from evernear.errors import IntegrityError
from evernear.frozen import Frozen


class Rule(Frozen):
    """One question and its answer; ``reason`` is a sentence, whether it passed or not."""

    name: str
    passed: bool
    candidate: float | None = None
    champion: float | None = None
    bound: float | None = None
    reason: str


class System(Frozen):
    """Which network and which index were measured; a release is the measured one if its parts have these
    hashes.
    """

    name: str
    network_sha256: str
    index_digest: str


class Verdict(Frozen):
    """Whether the candidate may replace the champion."""

    remedy = "run the gate step again"
    promote: bool
    reasons: list[str]
    """Of the rules that failed; of all rules, if none did."""
    rules: list[Rule]
    candidate: System
    champion: System | None
    dataset_digest: str
    digest: str
    """sha256 of all the rest."""

    @staticmethod
    def of(rules: Iterable[Rule], candidate: System, champion: System | None, dataset_digest: str) -> "Verdict":
        """The verdict that ``rules`` come to: they promote only if there are any and all of them passed."""
        rules = list(rules)
        promote = _all_passed(rules)
        verdict = Verdict(
            promote=promote,
            reasons=[rule.reason for rule in rules if promote or not rule.passed],
            rules=rules,
            candidate=candidate,
            champion=champion,
            dataset_digest=dataset_digest,
            digest="",
        )
        return verdict.model_copy(update={"digest": _digest(verdict)})

    @classmethod
    def from_json(cls, data: bytes | str, source: Path | str) -> Self:
        """A stored verdict that is consistent.

        Raises:
            IntegrityError: it is invalid, it was changed, or it promotes against its own rules.
        """
        verdict = super().from_json(data, source)
        if verdict.digest != _digest(verdict) or verdict.promote != _all_passed(verdict.rules):
            raise IntegrityError(f"The verdict {source} was changed after the gate; {cls.remedy}.")
        return verdict


def _all_passed(rules: Iterable[Rule]) -> bool:
    passed = [rule.passed for rule in rules]
    return bool(passed) and all(passed)


def _digest(verdict: Verdict) -> str:
    return sha256_bytes(verdict.model_dump_json(exclude={"digest"}).encode())
