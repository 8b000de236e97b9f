"""The result of a probe for unknown images; see `evernear.evaluation.probe`."""

from evernear.evaluation.statistics import Auroc, Proportion, Roc
from evernear.frozen import Frozen


class OpenSet(Frozen):
    """What a probe found; all but ``held_out`` is None where too few classes leave nothing to hold out.

    ``threshold`` alone, where it was taken over with a release's network.
    """

    held_out: tuple[str, ...]
    auroc: Auroc | None = None
    roc: Roc | None = None
    threshold: float | None = None
    """Beyond which all but `IndexSettings.false_accept_rate` of the images of classes held out lie, of those
    in the query and gallery splits: a release's open-set threshold."""
    false_accepts: Proportion | None = None
    """Test images of the classes held out that lie within the threshold."""
    false_rejects: Proportion | None = None
    """Test images of the other classes that lie beyond it."""
