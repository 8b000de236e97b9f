"""The fixtures of `tests.real.scenarios`."""

from tests.real.scenarios.conftest import digits_workspace, workspace

__all__ = ["digits_workspace", "workspace"]
