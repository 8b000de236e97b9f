"""The outcome of a run, told truly: promoted, held or failed.

The exit step of a KFP pipeline sees none of the run's artifacts, so the steps before it leave what it needs in the
store, under ``runs/<run>/``.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from evernear.store import Store


class Outcome(BaseModel):
    """What a run came to."""

    model_config = ConfigDict(frozen=True)

    run: str
    state: Literal["promoted", "held", "failed"]
    release: str | None = None
    reasons: tuple[str, ...] = ()
    metrics: dict[str, float] = {}

    def summary(self) -> str:
        """The outcome in one line."""
        match self.state:
            case "promoted":
                return f"promoted: release {self.release} serves"
            case "held":
                return "held: " + " ".join(self.reasons)
            case "failed":
                return "failed: " + " ".join(self.reasons)


def remember(store: Store, run: str, **parts: Mapping[str, Any]) -> None:
    """Leave ``parts`` (name -> JSON tree) of ``run`` in the store for `tell`."""
    for name, part in parts.items():
        store.put(_key(run, name), json.dumps(part, indent=2).encode())


def tell(store: Store, run: str, state: str, error_message: str) -> Outcome:
    """The outcome of ``run``, whose KFP state is ``state`` (SUCCEEDED, FAILED, CANCELLED ...); kept in the store."""
    verdict = _recall(store, run, "verdict")
    deployment = _recall(store, run, "deployment")
    metrics = _recall(store, run, "metrics")
    if state != "SUCCEEDED":
        reasons: tuple[str, ...] = (f"the pipeline ended as {state}. {error_message}".strip(),)
        outcome = Outcome(run=run, state="failed", reasons=reasons, metrics=metrics)
    elif verdict.get("promote") and deployment:
        release = deployment["version"]
        outcome = Outcome(run=run, state="promoted", release=release, reasons=verdict["reasons"], metrics=metrics)
    elif verdict.get("promote"):
        reasons = ("the gate promoted the candidate, but no deployment followed.",)
        outcome = Outcome(run=run, state="failed", reasons=reasons, metrics=metrics)
    else:
        outcome = Outcome(run=run, state="held", reasons=verdict.get("reasons", ()), metrics=metrics)
    remember(store, run, outcome=outcome.model_dump(mode="json"))
    return outcome


def _key(run: str, name: str) -> str:
    return f"runs/{run}/{name}.json"


def _recall(store: Store, run: str, name: str) -> dict[str, Any]:
    found = store.find(_key(run, name))
    return json.loads(found[0]) if found else {}
