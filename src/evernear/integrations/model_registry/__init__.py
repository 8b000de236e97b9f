"""Releases in Kubeflow's model registry, for teams that look for them there."""
