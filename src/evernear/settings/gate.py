"""The settings of the ``gate`` section."""

from typing import Literal

from pydantic import Field

from evernear.settings.section import Fraction, Section


class GateSettings(Section):
    """Conditions that a candidate must meet to replace the champion."""

    accuracy_floor: Fraction = Field(default=0.0, description="Smallest accuracy to promote; 0: any.")
    beat_baseline: bool = Field(
        default=True,
        description="Whether a first release must be significantly more accurate than trivial baselines.",
    )
    test_overlap_floor: Fraction = Field(
        default=0.9,
        description="Smallest share of the champion's test images that the test split must still contain.",
    )
    significance: float = Field(
        default=0.10, gt=0.0, lt=0.5, description="Largest probability of holding an equally good candidate."
    )
    max_undetected_loss: Fraction = Field(
        default=0.10,
        description="Largest loss of accuracy that the gate may fail to detect on the test split, with a probability "
        "of more than 10%; the verdict says so if it is exceeded.",
    )
    on_undetected_loss: Literal["warn", "hold"] = Field(
        default="warn",
        description="What the gate does beyond max_undetected_loss. Runs that the watcher starts without asking hold "
        "the candidate for a person unless this is set.",
    )
    class_recall_drop: Fraction = Field(
        default=0.05, description="Largest loss of recall in any class, compared with the champion."
    )
    replay_change: Fraction = Field(
        default=0.05,
        description="Largest share of the champion's answers to stored queries that may change beyond what the test "
        "split explains.",
    )
    class_recall_floor: Fraction = Field(default=0.5, description="Smallest recall of any class.")
    false_reject_ceiling: Fraction = Field(
        default=0.10, description="Largest share of known test images that may be called unknown."
    )
    index_recall_floor: Fraction = Field(
        default=0.99, description="Smallest recall of the approximate index, compared with exact search."
    )
    parity_tolerance: float = Field(
        default=1e-4, gt=0.0, description="As train.parity_tolerance, checked again by the gate."
    )
