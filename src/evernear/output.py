"""What evernear prints for people: one place where text from outside becomes printable.

Names of classes and files, fields of a release, answers of servers and names of people are chosen by others. Printed
as they are, they could steer the terminal (ESC), turn a line around (U+202E), hide its end (NUL) or add lines that
evernear never wrote. Every line for a console, a log or a report therefore goes through `printable`.
"""

import logging
import sys
from types import TracebackType
from typing import TextIO, TypeAlias

from pydantic_core import to_json

_ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def printable(text: str, limit: int | None = None) -> str:
    """``text`` on one line: what `str.isprintable` denies as an escape such as ``\\x1b``, ``\\u202e`` or ``\\n``.

    What is longer than ``limit`` characters ends in "...". Doing it twice changes nothing.
    """
    shown = text if limit is None else text[:limit]
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
    return escaped + "..." * (len(shown) < len(text))


def print_line(text: str = "", file: TextIO | None = None) -> None:
    """Print ``text`` as one line for a person, on stdout unless ``file`` is another stream."""
    print(printable(text), file=file or sys.stdout, flush=True)


def print_json(value: object) -> None:
    """Print ``value``, a pydantic model or a tree with some, as one line of JSON that holds nothing but ASCII."""
    text = to_json(value, ensure_ascii=True, inf_nan_mode="null").decode()
    print_line(text.replace("\x7f", "\\u007f"))  # DEL, the one control character that JSON need not escape


class LogFormatter(logging.Formatter):
    """A formatter whose records are one line each, with the lines of a traceback below."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """The line of a record, whatever its arguments hold."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802 - logging's own name
        """A traceback, whose last lines quote the exception."""
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


def log_to_stderr(level: int) -> None:
    """Send this process's log to stderr, from ``level`` on."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
