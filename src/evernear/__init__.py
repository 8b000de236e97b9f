"""evernear keeps an image recognizer up to date: from new labeled images to a gated release that is live."""

from importlib.metadata import version

from evernear import threads

threads.configure()  # before a numerical library is loaded

__version__ = version("evernear")
