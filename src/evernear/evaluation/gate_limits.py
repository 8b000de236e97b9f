"""The limits of the gate's rules that no setting changes."""

from evernear.evaluation.statistics import CONFIDENCE

CLASSES_SHARE = 0.2
"""Share of ``gate.significance`` that `class_recall` uses."""
ANCHOR_SHARE = 0.4
"""Share of ``gate.significance`` that `no_worse_than_anchor` uses. `no_worse` spends the rest."""
POWER = 0.9
"""Probability with which the loss that a verdict states is detected."""
MAX_UNDETECTED_LOSS = 0.10
"""Largest loss that the gate may fail to detect, with a probability of more than 1 -
`POWER`, without a warning."""
TEST_OVERLAP_FLOOR = 0.9
"""Smallest share of a release's test images that the test split must still contain for a
comparison."""
LARGEST_DROP = 0.05
"""Largest significant drop of the share of a class's images that are named right."""
LARGEST_INCREASE = 0.05
"""Largest significant increase of the share of known images that are called unknown, and of the
share of images of unseen classes that are accepted."""
REFUSALS_LEVEL = (1 - CONFIDENCE) / 2
"""Level of the one-sided test whether more known images are called unknown."""
