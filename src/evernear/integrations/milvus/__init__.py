"""Galleries in Milvus: an index backend, and an alias for the champion's collection."""

from evernear.common.plugins import Plugin
from evernear.common.run_record import RunRecord
from evernear.common.store import Store


def _backend() -> object:
    from evernear.integrations.milvus.index import MilvusBackend

    return MilvusBackend()


def _champion_moved(store: Store, before: str | None) -> list[str]:
    from evernear.integrations.milvus.alias import follow_alias

    return follow_alias(store, before)


def _run_ended(record: RunRecord, page: str) -> list[str]:
    """Repeat what an earlier promotion or rollback failed to do."""
    return _champion_moved(record.store, None)


PLUGIN = Plugin(
    install="evernear[milvus]",
    backends={"milvus": _backend},
    champion_moved=_champion_moved,
    run_ended=_run_ended,
)
