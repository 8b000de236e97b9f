"""The outcome of a run, told truly: promoted, held, rolled back or failed.

The exit step of a KFP pipeline sees none of the run's artifacts, so the steps before it leave what it needs in the
store, under ``runs/<run>/``.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from evernear.evaluation.verdict import Rule
from evernear.store import Store

SUCCEEDED = ("SUCCEEDED", "COMPLETE")
"""What kfp's local runner, and its server, call a group of steps that came to its end."""


class Outcome(BaseModel):
    """What a run came to."""

    model_config = ConfigDict(frozen=True)

    run: str
    state: Literal["promoted", "held", "rolled back", "failed"]
    release: str | None = None
    """What serves now because of the run; None where it changed nothing."""
    candidate: str | None = None
    """The release that the run packed, whether it serves or was held; None if it packed none."""
    reasons: tuple[str, ...] = ()
    metrics: dict[str, float] = {}

    def summary(self) -> str:
        """The outcome in one line."""
        match self.state:
            case "promoted":
                return f"promoted: release {self.release} serves"
            case "held":
                return "held: " + " ".join(self.reasons)
            case "rolled back":
                return f"rolled back: release {self.release} serves again. {' '.join(self.reasons)}".strip()
            case "failed":
                told = "failed: " + " ".join(self.reasons)
                return told + (f" Release {self.release} serves nevertheless." if self.release else "")


def remember(store: Store, run: str, **parts: Mapping[str, Any]) -> None:
    """Leave ``parts`` (name -> JSON tree) of ``run`` in the store for `tell`."""
    for name, part in parts.items():
        store.put(_key(run, name), json.dumps(part, indent=2).encode())


def remember_confusion(store: Store, run: str, png: bytes) -> None:
    """Leave the picture of the candidate's confusion matrix, for who tells the outcome elsewhere."""
    store.put(_confusion_key(run), png)


def recall_outcome(store: Store, run: str) -> Outcome | None:
    """What `tell` told of ``run``; None before that."""
    found = _recall(store, run, "outcome")
    return Outcome.model_validate(found) if found else None


def recall_rules(store: Store, run: str) -> tuple[Rule, ...]:
    """The rules of the verdict of ``run``: candidate, champion and bound of each; none before the gate."""
    return tuple(Rule.model_validate(rule) for rule in _recall(store, run, "verdict").get("rules", ()))


def recall_confusion(store: Store, run: str) -> bytes | None:
    """The picture (PNG) that `remember_confusion` left, if it did."""
    found = store.find(_confusion_key(run))
    return found[0] if found else None


def tell(store: Store, run: str, state: str, error_message: str) -> Outcome:
    """The outcome of ``run``, whose KFP state is ``state`` (COMPLETE, FAILED, RUNNING ...); kept in the store.

    A run that is held is told by what its steps left, since KFP's server does not count the skipped deployment: it
    leaves the state at RUNNING, or at FAILED if a step of the run had to be tried again.
    """
    verdict = _recall(store, run, "verdict")
    deployment = _recall(store, run, "deployment")
    rollback = _recall(store, run, "rollback")
    promotion = _recall(store, run, "promotion")
    metrics = _recall(store, run, "metrics")
    candidate = _recall(store, run, "archived").get("version")
    held = candidate is not None and verdict.get("promote") is False
    if state not in SUCCEEDED and not held:
        reasons: tuple[str, ...] = (f"{_ended(state)} {error_message}".strip(),)
        serving = (rollback or promotion or deployment).get("version")
        outcome = Outcome(run=run, state="failed", release=serving, reasons=reasons, metrics=metrics)
    elif rollback:
        reasons = (rollback["why"],) if rollback["why"] else ()
        outcome = Outcome(run=run, state="rolled back", release=rollback["version"], reasons=reasons)
    elif promotion:
        outcome = Outcome(run=run, state="promoted", release=promotion["version"], reasons=(promotion["why"],))
    elif verdict.get("promote") and deployment:
        release = deployment["version"]
        outcome = Outcome(run=run, state="promoted", release=release, reasons=verdict["reasons"], metrics=metrics)
    elif verdict.get("promote"):
        reasons = ("the gate promoted the candidate, but no deployment followed.",)
        outcome = Outcome(run=run, state="failed", reasons=reasons, metrics=metrics)
    else:
        outcome = Outcome(run=run, state="held", reasons=verdict.get("reasons", ()), metrics=metrics)
    outcome = outcome.model_copy(update={"candidate": candidate})
    remember(store, run, outcome=outcome.model_dump(mode="json"))
    return outcome


def _ended(state: str) -> str:
    if state == "RUNNING":  # nobody was left to tell KFP of the step's end
        return "a step was stopped, or ended without a word."
    return f"the pipeline ended as {state}."


def _key(run: str, name: str) -> str:
    return f"runs/{run}/{name}.json"


def _confusion_key(run: str) -> str:
    return f"runs/{run}/confusion.png"


def _recall(store: Store, run: str, name: str) -> dict[str, Any]:
    found = store.find(_key(run, name))
    return json.loads(found[0]) if found else {}
