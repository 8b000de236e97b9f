"""Serving benchmark: evernear compared with servers that its users already have or would write; see `__main__`."""
