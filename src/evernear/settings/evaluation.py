"""The settings of the ``evaluation`` section."""

from pydantic import Field

from evernear.settings.parts_job import Nodes
from evernear.settings.section import Section


class EvaluationSettings(Section):
    """The measurement of the candidate and the champion."""

    confidence: float = Field(default=0.95, gt=0.5, lt=1.0, description="Confidence level of every interval.")
    held_out_classes: int = Field(
        default=0,
        ge=0,
        description="Classes left out of each draw of the open-set probe; 0: a fifth of the classes, at least 2.",
    )
    probe_epochs: int = Field(
        default=0,
        ge=0,
        description="Epochs of the open-set probe; 0: a quarter of those of training, 60% with Muon.",
    )
    batch_size: int = Field(default=512, ge=1, description="Images per forward pass.")
    nodes: Nodes = Field(
        default=1,
        description="Nodes that answer the queries of the test split, as ``index.nodes``.",
    )
