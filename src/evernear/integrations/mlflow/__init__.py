"""Log runs to MLflow, for teams that compare runs there."""
