"""The handler in every archive. It refers to the installed handler,
so archives survive package changes.
"""

from evernear.serving.handler import EmbeddingHandler


class Handler(EmbeddingHandler):
    """TorchServe finds this class because it is the only class of the module."""
