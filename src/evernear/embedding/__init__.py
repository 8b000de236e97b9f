"""The embedding network: trained with ArcFace, exported to TorchScript, run over the gallery."""

import os

# Some virtual machines announce AMX and trap at its first instruction, which oneDNN uses for bfloat16. The variable
# has to be set before oneDNN's first use; a user's own value wins.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
