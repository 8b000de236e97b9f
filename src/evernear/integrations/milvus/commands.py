"""``evernear registry alias``."""

from evernear.cli.options import ConfigOption, SetOption, WorkdirOption
from evernear.cli.releases import StoreOption, registry_of
from evernear.common.output import print_line
from evernear.errors import StoreError


def alias(
    store: StoreOption = None, config: ConfigOption = None, overrides: SetOption = None, workdir: WorkdirOption = None
) -> None:
    """Point the Milvus alias at the champion's collection, if a promotion or a rollback
    failed to do so."""
    from evernear.integrations.milvus.alias import point_alias

    collection = point_alias(registry_of(store, config, overrides, workdir))
    if collection is None:
        raise StoreError("The champion has no collection in Milvus.")
    print_line(f"{collection.alias} points at {collection.name}.")
