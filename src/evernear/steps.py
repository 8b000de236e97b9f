"""The journey, step by step: what each pipeline step does, as one function of paths and settings.

A component under ``components/`` calls the function of its own name and nothing else, so every step also runs
without KFP. The rooms do the work; here they are only put together.
"""

from pathlib import Path
from typing import Any

from evernear.data.ingest import ingest as ingest_images
from evernear.data.ingest import save_manifest
from evernear.data.shards import Dataset
from evernear.data.validate import require_valid
from evernear.data.validate import validate as validate_dataset
from evernear.progress import step
from evernear.settings import (
    DataSettings,
    EvaluationSettings,
    GateSettings,
    IndexSettings,
    ServingSettings,
    TrainSettings,
    ValidationSettings,
    parse,
)
from evernear.store import open_store

Tree = dict[str, Any]
"""A settings section as KFP carries it."""
