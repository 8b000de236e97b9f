"""Model servers for releases, and clients for these servers.

`core.Predictor` recognizes images with one release. `handler` wraps it for TorchServe, and `http`
for InferenceServices and as the preprocessing server in front of TorchServe. `release_source`
provides the release. `request_parsing`, `decoding` and `http.limits` handle untrusted input.
`responses` defines the response bodies of all servers.

The modules for TorchServe are `torchserve` (lifecycle), `configuration`, `endpoints` and `metrics`,
and the Java sources in ``frontend``. `pod` implements the commands that run in a serving pod.
"""

from pathlib import Path

HANDLER = Path(__file__).with_name("archived_handler.py")
"""The module that TorchServe runs. The archive step copies it into every release."""
