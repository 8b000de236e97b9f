"""The handler in every archive. It refers to the installed one, so an archive survives changes of the package."""

from evernear.serving.handler import EmbeddingHandler


class Handler(EmbeddingHandler):
    """The only class of this module, which is how TorchServe finds it."""
