"""Files of whoever names them: they may be anything that a disk can hold."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read it. A pipe, whose reader would wait for a writer, a device or a directory is refused.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 - Path.open takes no opener
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # to a regular file it makes no difference
