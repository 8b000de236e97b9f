from evernear.common.frozen import Frozen
from evernear.data.preprocess import NetworkInput


class Architecture(Frozen):
    """Everything needed to build a network, except the weights."""

    shape: tuple[int, int, int]
    """Height, width and number of channels of an image."""
    mean: tuple[float, ...]
    """Mean of each channel over the training images, with pixels scaled to 0..1."""
    std: tuple[float, ...]
    patch_px: int
    """Side length in pixels of the patches whose pixels become channels before the first
    convolution."""
    width: int
    """Number of output channels of the first convolution."""
    embedding_dim: int
    """Dimensions of the whole embedding, of which each ensemble member computes an equal share."""
    members: int = 1
    backbone: str = "compact"
    """A name in `evernear.embedding.network.MEMBERS`, or a timm model. ``input`` and ``frozen``
    apply only to timm models."""
    input: NetworkInput | None = None
    frozen: bool = False
    """Whether only an affine map of the backbone's features was fitted or trained."""
    pretrained: bool = False
    """Whether training started from a pretrained backbone and an affine map of its features."""
    test_time_flip: bool = False
    """Whether to average the embeddings of an image and its mirror image."""
