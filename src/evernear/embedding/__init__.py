"""The embedding network: train it with ArcFace, export it as TorchScript, embed images with it."""

import os

# Some virtual machines advertise AMX but raise SIGILL at its first instruction, which oneDNN uses for bfloat16. The
# variable must be set before oneDNN is first used. A value set by the user takes precedence.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
