from typing import Literal

from pydantic import Field

from evernear.settings.section import Fraction, Section


class EvaluationSettings(Section):
    """The measurement of the candidate and the champion."""

    probe_epochs: int = Field(
        default=0,
        ge=0,
        description="Epochs of the open-set probe; 0: a quarter of those of training, 60% with Muon.",
    )


class GateSettings(Section):
    """Conditions that a candidate must meet to replace the champion."""

    accuracy_floor: Fraction = Field(
        default=0.0, description="Smallest share of test images with the right label to promote; 0: any."
    )
    beat_baseline: bool = Field(
        default=True,
        description="Whether a first release must be significantly better than trivial baselines.",
    )
    significance: float = Field(
        default=0.10, gt=0.0, lt=0.5, description="Largest probability of holding an equally good candidate."
    )
    on_undetected_loss: Literal["warn", "hold"] = Field(
        default="warn",
        description="What the gate does if the test split is too small to detect a loss of 10 points. Runs that the "
        "watcher starts without asking hold the candidate for a person unless this is set.",
    )
    class_recall_floor: Fraction = Field(default=0.5, description="Smallest share of right labels of any class.")
    false_reject_ceiling: Fraction = Field(
        default=0.10, description="Largest share of known test images that may be called unknown."
    )
