"""Serving benchmark: evernear compared with servers that its users have or would write; see `__main__`."""
