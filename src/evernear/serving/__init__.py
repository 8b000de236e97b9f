"""Servers for releases, and their clients.

Every server wraps `core.Predictor`, which recognizes images with one release: `handler`
in TorchServe, and `kserve` in an InferenceService. `release_source` provides the
release. `request_parsing`, `decoding` and `http_limits` handle untrusted input.
`responses` contains the bodies that all servers return. `prep` is a preprocessing
server in front of TorchServe.

The modules for TorchServe are `torchserve` (lifecycle), `java`, `configuration`,
`endpoints`, `management`, `metrics` and `frontend`. `pod` contains the processes of a
serving pod.
"""

from pathlib import Path

HANDLER = Path(__file__).with_name("archived_handler.py")
"""The module that TorchServe runs. The archive step copies it into every release."""
