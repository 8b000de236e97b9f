"""The handler in every archive. It only names the installed one, so an archive outlives changes of the package."""

from evernear.serving.handler import EmbeddingHandler


class Handler(EmbeddingHandler):
    """The only class of this module, which is how TorchServe finds it."""
