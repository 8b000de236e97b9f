"""Train the embedding network with ArcFace, export it as TorchScript, and embed images."""

import os
from pathlib import Path

# Some virtual machines advertise AMX but raise SIGILL at the first AMX instruction. oneDNN uses AMX
# for bfloat16. The variable ONEDNN_MAX_CPU_ISA must be set before oneDNN is first used. A value set
# by the user takes precedence.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# With this variable, torch requests huge pages for tensors of 2 MiB or more. The memory of large
# tensors is returned to the system after each layer. With pages of 4 KiB, the next layer would
# cause hundreds of thousands of page faults per second. The variable must be set before the first
# tensor is created. On kernels without huge pages, torch would warn.
if Path("/sys/kernel/mm/transparent_hugepage").exists():
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

DESCRIPTION_FILE = "network.json"
"""The description of a network, in the output of the train step and of the export step."""
