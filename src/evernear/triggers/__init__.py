"""Triggers: decide to train again, ask for confirmation, start a run and follow it.

The watcher (`watch`) decides, and people decide in Slack (`slack`).
"""
