"""What only a new process shows: its imports, huge pages, and instructions of the machine."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evernear.data.shards import Dataset
from evernear.embedding.export import describe_network

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SCRIPT = """
import sys
sys.modules["timm"] = sys.modules["torchvision"] = sys.modules["huggingface_hub"] = None
import numpy as np
from pathlib import Path
from evernear.embedding.data_loader import embed_images
from evernear.embedding.export import load_network
import evernear.serving.core
import torch
print(embed_images(load_network(Path(sys.argv[1])), np.load(sys.argv[2])).shape, flush=True)
image = torch.ones(2**24)
flags = [line.split() for line in Path("/proc/self/smaps").read_text().splitlines() if line.startswith("VmFlags")]
print(sum("hg" in each for each in flags), flush=True)
with torch.autocast('cpu', torch.bfloat16): torch.nn.Linear(256, 128)(torch.zeros(256, 256))
print("bfloat16 works")
"""


def run(network_dir: Path, images: Path, **variables: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    command = [sys.executable, "-c", SCRIPT, str(network_dir), str(images)]
    ran = subprocess.run(command, env=environment | variables, stdout=subprocess.PIPE, text=True, check=False)
    return ran.stdout.splitlines()


@pytest.fixture(scope="module")
def images_file(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "images.npy"
    np.save(path, next(digits.blocks("test", 2)).images)
    return path


@pytest.fixture(scope="module")
def printed(frozen_network_dir: Path, images_file: Path) -> list[str]:
    return run(frozen_network_dir, images_file)


@pytest.mark.slow
def test_a_release_is_served_without_timm(printed: list[str], frozen_network_dir: Path) -> None:
    assert printed[0] == f"(2, {describe_network(frozen_network_dir).embedding_dim})"


@pytest.mark.slow
@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="The kernel has no transparent huge pages.")
def test_large_tensors_are_in_huge_pages(printed: list[str]) -> None:
    assert int(printed[1]) > 0


@pytest.mark.slow
@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="The kernel has no transparent huge pages.")
def test_huge_pages_can_be_disabled(frozen_network_dir: Path, images_file: Path) -> None:
    assert int(run(frozen_network_dir, images_file, THP_MEM_ALLOC_ENABLE="0")[1]) == 0


@pytest.mark.slow
def test_bfloat16_works_on_a_machine_that_advertises_amx_without_supporting_it(printed: list[str]) -> None:
    """Such a machine would kill the process with SIGILL."""
    assert printed[2:] == ["bfloat16 works"]
