"""Serving benchmark: evernear compared with servers that users already have or would write; see
`__main__`."""
