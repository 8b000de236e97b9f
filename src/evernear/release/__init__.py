"""Releases: the archive of a network, an index and labels with one version, its
manifest, and the registry."""
