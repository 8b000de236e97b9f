"""Tune settings: on one machine with Optuna, or in a cluster with Katib (``pipelines/tune.py``)."""

from evernear.common.plugins import Command, Plugin


def _commands() -> list[Command]:
    from evernear.integrations.tuning.commands import trial, tune

    return [Command("tune", tune, panel="Every day"), Command("trial", trial, panel="")]


PLUGIN = Plugin(install="evernear[tune]", commands=_commands)
