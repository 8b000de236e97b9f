"""Disks that are too small, as `ulimit -f` makes them: for this process and those it starts."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """No file may be written beyond ``size_bytes``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
