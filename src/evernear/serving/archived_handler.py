"""The handler in every archive. The module only imports the installed handler, so archives remain
valid when the package changes."""

from evernear.serving.handler import EmbeddingHandler


class Handler(EmbeddingHandler):
    """The handler class, which TorchServe finds because the module defines no other class."""
