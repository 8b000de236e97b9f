"""The result of the open-set probe; see `evernear.evaluation.probe`."""

from evernear.evaluation.statistics import Auroc, Proportion, Roc
from evernear.frozen import Frozen


class OpenSet(Frozen):
    """The result of a probe. With too few classes to hold any out, ``held_out`` is empty and all else is None.

    If the network is reused from a release, only ``threshold`` is set.
    """

    held_out: tuple[str, ...]
    auroc: Auroc | None = None
    roc: Roc | None = None
    threshold: float | None = None
    """Open-set threshold of a release: it accepts `IndexSettings.false_accept_rate` of the query and gallery images of
    held-out classes."""
    false_accepts: Proportion | None = None
    """Test images of held-out classes within the threshold."""
    false_rejects: Proportion | None = None
    """Test images of the other classes beyond the threshold."""
