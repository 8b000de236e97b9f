"""Releases in Kubeflow's model registry, for teams that look up their models there."""
