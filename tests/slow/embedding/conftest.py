"""The fixtures of `tests.real.embedding`."""

from tests.real.embedding.conftest import digits, digits_dir

__all__ = ["digits", "digits_dir"]
