"""The Label Studio plugin: two commands that exchange tasks and annotations with Label
Studio."""

from evernear.common.plugins import Command, Plugin


def _commands() -> list[Command]:
    from evernear.integrations.label_studio.commands import export, import_

    return [Command("export", export, group="labels"), Command("import", import_, group="labels")]


PLUGIN = Plugin(install="evernear", commands=_commands)
