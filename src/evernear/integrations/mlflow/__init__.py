"""Runs in MLflow, for teams that compare them there."""
