"""Triggers: decide to train again, ask for confirmation, start a pipeline run, and
follow the run.
"""
