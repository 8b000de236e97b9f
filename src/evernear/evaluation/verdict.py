"""What the gate decided, as a file. Who only reads a verdict loads no more than this."""

from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from evernear.errors import IntegrityError
from evernear.store import sha256_bytes

_NO_VERDICT = "{} is no verdict; nothing is promoted without one."


class Rule(BaseModel):
    """One question and its answer; ``reason`` is a sentence, whether it passed or not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    passed: bool
    candidate: float | None = None
    champion: float | None = None
    bound: float | None = None
    reason: str


class System(BaseModel):
    """Which network and which index were measured; a release is the measured one if its parts have these
    hashes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    network_sha256: str
    index_digest: str


class Verdict(BaseModel):
    """May the candidate serve?"""

    model_config = ConfigDict(frozen=True, extra="forbid")

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

    @staticmethod
    def load(path: Path) -> "Verdict":
        """A stored verdict that holds together.

        Raises:
            IntegrityError: there is none, it was changed, or it promotes against its own rules.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise IntegrityError(_NO_VERDICT.format(path)) from error
        return Verdict.parse(data, str(path))

    @staticmethod
    def parse(data: bytes, path: str) -> "Verdict":
        """`load`, for the content of the file ``path``."""
        try:
            verdict = Verdict.model_validate_json(data)
        except ValidationError as error:
            raise IntegrityError(_NO_VERDICT.format(path)) from error
        if verdict.digest != _digest(verdict) or verdict.promote != _all_passed(verdict.rules):
            raise IntegrityError(f"The verdict {path} was changed after the gate; run the gate step again.")
        return verdict


def _all_passed(rules: Iterable[Rule]) -> bool:
    passed = [rule.passed for rule in rules]
    return bool(passed) and all(passed)


def _digest(verdict: Verdict) -> str:
    return sha256_bytes(verdict.model_dump_json(exclude={"digest"}).encode())
