"""The memory that training needs."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dataset_images import write_images


@pytest.mark.slow
def test_training_on_photographs_stays_below_three_gigabytes(tmp_path: Path) -> None:
    write_images(tmp_path / "images", 200, size=(224, 224), mode="RGB")
    script = f"""
import tempfile
from pathlib import Path
from evernear.data.ingest import ingest_source
from evernear.data.shards import Dataset
from evernear.embedding.export import export_network
from evernear.embedding.recipe import with_defaults
from evernear.embedding.train import train_network
from evernear.settings import DataSettings, TrainSettings
from evernear.common.store import open_store
manifest = ingest_source(DataSettings(source="folder:{tmp_path}/images", size_px=224), "file://{tmp_path}/store")
dataset = Dataset(manifest, open_store(manifest.store_uri))
recipe = with_defaults(TrainSettings(epochs=1, min_steps=2), dataset, precision="float32")
train_network(dataset, recipe, Path("{tmp_path}/trained"))
# Two steps leave the statistics of batch normalization so far off that rounding is magnified.
export_network(Path("{tmp_path}/trained"), dataset, Path("{tmp_path}/network"), tolerance=2.0)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 3e9
