"""Register releases in Kubeflow's model registry, for teams that look up models there."""
