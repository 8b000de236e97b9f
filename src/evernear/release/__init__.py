"""Releases: network, index and labels as one version. The archive, its manifest and the registry."""
