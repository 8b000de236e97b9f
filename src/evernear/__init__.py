"""evernear keeps an image recogniser fresh: from new labelled images to a gated release that serves."""

from importlib.metadata import version

from evernear import threads

threads.configure()  # before a numerical library is loaded

__version__ = version("evernear")
