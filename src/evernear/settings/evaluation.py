from pydantic import Field

from evernear.settings.section import Section


class EvaluationSettings(Section):
    """The measurement of the candidate and the champion."""

    probe_epochs: int = Field(
        default=0,
        ge=0,
        description="Epochs of the open-set probe; 0: a quarter of those of training, 60% with Muon.",
    )
