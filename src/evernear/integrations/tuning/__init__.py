"""Tuning: trials of other settings, on a laptop with Optuna or in a cluster with Katib (``pipelines/tune.py``)."""
