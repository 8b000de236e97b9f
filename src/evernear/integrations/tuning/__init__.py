"""Tune settings: on one machine with Optuna, or in a cluster with Katib (``pipelines/tune.py``)."""
