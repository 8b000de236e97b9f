"""Decide to train again, ask a person, start a pipeline run and follow it."""
