"""Optional integrations, one folder each. In each folder, ``plugin.py`` defines the features of the
integration (`evernear.common.plugins`).

The core never imports an integration, and integrations do not import each other.
"""
