"""Tuning: trials with different settings, on a laptop with Optuna or in a cluster with
Katib (``pipelines/tune.py``)."""
