"""Output for people, with untrusted text escaped.

Class and file names, fields of a release, responses of servers and user names are untrusted. Printed verbatim, they
could control the terminal (ESC), reverse a line (U+202E), hide its end (NUL) or forge lines. Every line for a console,
a log or a report therefore goes through `printable`.
"""

import logging
import sys
from types import TracebackType
from typing import TextIO, TypeAlias

from pydantic_core import to_json

_ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def printable(text: str, limit: int | None = None) -> str:
    """``text`` on one line, with unprintable characters escaped as in ``\\x1b``, ``\\u202e`` or ``\\n``.

    Text longer than ``limit`` characters is truncated and ends in "...". The function is idempotent.
    """
    shown = text if limit is None else text[:limit]
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
    return escaped + "..." * (len(shown) < len(text))


def print_line(text: str = "", file: TextIO | None = None) -> None:
    """Print ``text`` as one line to ``file`` (stdout by default)."""
    print(printable(text), file=file or sys.stdout, flush=True)


def print_json(value: object) -> None:
    """Print ``value``, which may contain pydantic models, as one line of ASCII JSON."""
    text = to_json(value, ensure_ascii=True, inf_nan_mode="null").decode()
    print_line(text.replace("\x7f", "\\u007f"))  # DEL, the only control character that JSON does not escape


class LogFormatter(logging.Formatter):
    """A formatter that prints each record on one line, followed by the traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """The line of a record, with untrusted arguments escaped."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802 - logging's own name
        """A traceback; its last lines quote the exception, which is untrusted."""
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


def log_to_stderr(level: int) -> None:
    """Log to stderr from ``level`` on."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
