"""Kubeflow's model registry, if ``MODEL_REGISTRY_BASE_URL`` (also KServe's variable) is set."""

import os
from typing import TYPE_CHECKING

from evernear.common.plugins import Plugin

if TYPE_CHECKING:
    from evernear.common.run_record import RunRecord
    from evernear.release.promotions import Champion
    from evernear.release.registry import Registry

ADDRESS = "MODEL_REGISTRY_BASE_URL"


def _champion_moved(registry: "Registry", before: "Champion | None") -> list[str]:
    if not os.environ.get(ADDRESS):
        return []
    from evernear.integrations.model_registry.entries import follow_champion

    return follow_champion(registry)


def _run_ended(record: "RunRecord", page: str) -> list[str]:
    if not os.environ.get(ADDRESS):
        return []
    from evernear.integrations.model_registry.entries import register

    return register(record)


PLUGIN = Plugin(install="evernear", champion_moved=_champion_moved, run_ended=_run_ended)
