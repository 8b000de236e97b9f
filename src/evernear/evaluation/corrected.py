"""Test images whose label was corrected in the console.

Users look at what the model got wrong, so correcting labels there can only raise the share of
images named right. The figures are therefore also shown without these images, which stay in the
test split (docs/decisions/0024-labels.md).
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from evernear.embedding.embeddings import digest_strings
from evernear.evaluation.headline import AnswerCounts

if TYPE_CHECKING:
    from evernear.evaluation.measure import AnsweredBlock


class CorrectedCounter:
    """Observes a measurement (`evernear.evaluation.measure`), and counts the answers to the images
    with the ``digests``."""

    def __init__(self, digests: Iterable[bytes]) -> None:
        self._digests = np.array(sorted(digests), "S32")
        self._counts = np.zeros(3, np.int64)

    def add(self, answered: "AnsweredBlock") -> None:
        block, answers = answered.block, answered.answers
        among = np.isin(digest_strings(block.digests), self._digests)
        right = answers.labels == block.labels
        for place, chosen in enumerate((right & ~answers.unknown, ~right & ~answers.unknown, answers.unknown)):
            self._counts[place] += np.count_nonzero(among & chosen)

    def counts(self) -> AnswerCounts | None:
        """None without such images in the split."""
        right, wrong, unknown = self._counts.tolist()
        counts = AnswerCounts(named_right=right, named_wrong=wrong, called_unknown=unknown)
        return counts if counts.images else None
