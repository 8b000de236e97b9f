"""Registers releases in Kubeflow's model registry if ``MODEL_REGISTRY_BASE_URL`` (also KServe's
variable) is set."""

from evernear.common.plugins import Plugin
from evernear.common.run_record import RunRecord
from evernear.common.store import Store


def _champion_moved(store: Store, before: str | None) -> list[str]:
    from evernear.integrations.model_registry.entries import follow_champion

    return follow_champion(store)


def _run_ended(record: RunRecord, page: str) -> list[str]:
    from evernear.integrations.model_registry.entries import register

    return register(record)


PLUGIN = Plugin(install="evernear", champion_moved=_champion_moved, run_ended=_run_ended)
