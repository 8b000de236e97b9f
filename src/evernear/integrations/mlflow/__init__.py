"""Runs in MLflow, for teams that compare their runs there."""
