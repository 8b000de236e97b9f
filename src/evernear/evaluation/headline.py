"""The headline of a release: what happens to a user's images, in counts.

"Label right" ignores whether an image is called unknown. It compares networks, and is no headline.
"""

from collections.abc import Mapping

from pydantic import Field

from evernear.common.frozen import Frozen
from evernear.common.output import quantity
from evernear.evaluation.verdict import classes_tested


class AnswerCounts(Frozen):
    """Every image is counted once. An image called unknown is not named, whatever the label of its
    neighbors."""

    named_right: int = Field(ge=0)
    named_wrong: int = Field(ge=0)
    called_unknown: int = Field(ge=0)

    @property
    def images(self) -> int:
        return self.named_right + self.named_wrong + self.called_unknown

    def sentence(self, image: str = "test image", images: str = "") -> str:
        """Without a capital letter and a full stop. ``image`` and ``images`` name what was
        counted."""
        return (
            f"of {quantity(self.images, image, images)}: {self.named_right:,} named right, {self.named_wrong:,} named "
            f"wrong, {self.called_unknown:,} called unknown"
        )

    def without(self, corrected: "AnswerCounts | None") -> "AnswerCounts | None":
        """The answers to the images whose label was not ``corrected``, or None if none was.

        Users correct what a model gets wrong, which can only raise the share named right, so
        figures are also shown without these images (docs/decisions/0024-labels.md).
        """
        if corrected is None:
            return None
        own, left_out = self.model_dump(), corrected.model_dump()
        return AnswerCounts(**{name: own[name] - left_out[name] for name in own})

    @staticmethod
    def of_metrics(metrics: Mapping[str, float]) -> "AnswerCounts | None":
        """None if the metrics of a release or a run do not contain the counts."""
        fields = AnswerCounts.model_fields
        if not all(name in metrics for name in fields):
            return None
        return AnswerCounts(**{name: int(metrics[name]) for name in fields})


def headline(metrics: Mapping[str, float]) -> str:
    """The sentence for the metrics of a release or a run, with which all pages, messages and
    commands describe it. Empty if nothing was measured."""
    counts = AnswerCounts.of_metrics(metrics)
    if counts is None:
        return ""
    tested = classes_tested(metrics)
    return f"{counts.sentence()} ({tested})" if tested else counts.sentence()
