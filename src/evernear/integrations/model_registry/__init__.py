"""Registers releases in Kubeflow's model registry if ``MODEL_REGISTRY_BASE_URL`` (also KServe's
variable) is set."""

import os

from evernear.common.plugins import Plugin
from evernear.common.run_record import RunRecord
from evernear.common.store import Store

ADDRESS = "MODEL_REGISTRY_BASE_URL"


def _champion_moved(store: Store, before: str | None) -> list[str]:
    if not os.environ.get(ADDRESS):
        return []
    from evernear.integrations.model_registry.entries import follow_champion

    return follow_champion(store)


def _run_ended(record: RunRecord, page: str) -> list[str]:
    if not os.environ.get(ADDRESS):
        return []
    from evernear.integrations.model_registry.entries import register

    return register(record)


PLUGIN = Plugin(install="evernear", champion_moved=_champion_moved, run_ended=_run_ended)
