"""Optional integrations, one folder each. The ``plugin.py`` of a folder defines its
features (`evernear.plugins`).

The core never imports an integration, and integrations do not import each other.
"""
