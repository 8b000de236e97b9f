"""torch requests huge pages for large tensors, unless the user decides otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SCRIPT = """
import evernear.evaluation.recognizer
import torch
from pathlib import Path
image = torch.ones(2**24)
flags = [line.split() for line in Path("/proc/self/smaps").read_text().splitlines() if line.startswith("VmFlags")]
print(sum("hg" in each for each in flags))
"""


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="The kernel has no transparent huge pages.")
@pytest.mark.parametrize(("chosen", "is_advised"), [(None, True), pytest.param("0", False, marks=pytest.mark.slow)])
def test_large_tensors_are_in_huge_pages(chosen: str | None, is_advised: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    if chosen is not None:
        environment["THP_MEM_ALLOC_ENABLE"] = chosen
    command = [sys.executable, "-c", SCRIPT]
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert (int(ran.stdout) > 0) == is_advised
