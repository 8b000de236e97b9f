"""Releases, their manifests, and the registry. A release is a versioned archive with a network, an
index and labels."""
