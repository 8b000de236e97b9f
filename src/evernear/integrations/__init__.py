"""Optional integrations, one folder each: what it offers is in its ``plugin.py`` (`evernear.plugins`).

The core never imports them, and they do not import each other.
"""
