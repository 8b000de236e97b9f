"""The Milvus plugin: an index backend, and an alias for the champion's collection."""

from typing import TYPE_CHECKING

from evernear.common.plugins import IndexBackend, Plugin

if TYPE_CHECKING:
    from evernear.common.run_record import RunRecord
    from evernear.release.promotions import Champion
    from evernear.release.registry import Registry


def _backend() -> IndexBackend:
    from evernear.integrations.milvus.index import MilvusBackend

    return MilvusBackend()


def _champion_moved(registry: "Registry", before: "Champion | None") -> list[str]:
    from evernear.integrations.milvus.alias import follow_alias

    return follow_alias(registry, before)


def _run_ended(record: "RunRecord", page: str) -> list[str]:
    """Repeat what an earlier promotion or rollback failed to do."""
    from evernear.release.registry import Registry

    return _champion_moved(Registry(record.store), None)


PLUGIN = Plugin(
    install="evernear[milvus]",
    backends={"milvus": _backend},
    champion_moved=_champion_moved,
    run_ended=_run_ended,
)
