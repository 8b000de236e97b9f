"""evernear keeps an image recogniser fresh: from new labelled images to a gated release that serves."""

from importlib.metadata import version

__version__ = version("evernear")
