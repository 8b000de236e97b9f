"""Train the embedding network with ArcFace, export it as TorchScript,
and embed images.
"""

import os

# Some virtual machines advertise AMX but raise SIGILL at the first AMX instruction.
# oneDNN uses AMX for bfloat16. The variable ONEDNN_MAX_CPU_ISA must be set before
# oneDNN is first used. A value set by the user takes precedence.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

DESCRIPTION_FILE = "network.json"
"""The description of a network, in the output of the train step and of the export
step."""
