"""Network, index and labels as one version: the archive, its manifest and the registry."""
