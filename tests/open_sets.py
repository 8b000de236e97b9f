"""Draws of the open-set probe, made from given distances."""

import numpy as np

from evernear.evaluation.assess import Distances, Draw, Sample


def draw_of(known: Distances, unknown: Distances, classes: int = 2) -> Draw:
    """A draw that tests and calibrates with the same distances, of ``classes`` known and held-out
    classes in turns."""
    return Draw(*(Sample(part, (np.arange(len(part)) % classes,)) for part in (known, unknown)), known, unknown)
