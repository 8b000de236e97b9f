"""The Milvus plugin: an index backend, an alias for the champion's collection, and a
command that sets the alias again."""

from typing import TYPE_CHECKING

from evernear.common.plugins import Command, IndexBackend, Plugin

if TYPE_CHECKING:
    from evernear.release.promotions import Champion
    from evernear.release.registry import Registry


def _backend() -> IndexBackend:
    from evernear.integrations.milvus.index import MilvusBackend

    return MilvusBackend()


def _champion_moved(registry: "Registry", before: "Champion | None") -> list[str]:
    from evernear.integrations.milvus.alias import follow_alias

    return follow_alias(registry, before)


def _commands() -> list[Command]:
    from evernear.integrations.milvus.commands import alias

    return [Command("alias", alias, group="registry")]


PLUGIN = Plugin(
    install="evernear[milvus]",
    backends={"milvus": _backend},
    champion_moved=_champion_moved,
    commands=_commands,
)
