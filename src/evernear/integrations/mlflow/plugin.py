"""The MLflow plugin, which logs runs if ``MLFLOW_TRACKING_URI`` is set to the server's address."""

import os
from typing import TYPE_CHECKING

from evernear.common.plugins import Plugin

if TYPE_CHECKING:
    from evernear.common.run_record import RunRecord

ADDRESS = "MLFLOW_TRACKING_URI"


def _run_ended(record: "RunRecord", page: str) -> list[str]:
    if not os.environ.get(ADDRESS):
        return []
    from evernear.integrations.mlflow.tracking import track

    return track(record, page)


PLUGIN = Plugin(install="evernear[mlflow]", run_ended=_run_ended)
