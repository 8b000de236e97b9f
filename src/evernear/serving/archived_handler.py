"""The handler in every archive imports the installed one, so that old archives stay valid."""

from evernear.serving.handler import EmbeddingHandler


class Handler(EmbeddingHandler):
    """TorchServe finds this class because the module defines no other."""
