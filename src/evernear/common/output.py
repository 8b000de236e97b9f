"""Output for people, with untrusted text escaped and secrets masked.

Class and file names, fields of a release, server responses and user names are untrusted. Printed
verbatim, they could control the terminal (ESC), reverse a line (U+202E), hide its end (NUL) or
forge lines. Every line for a console, a log or a report therefore passes through `printable`.
"""

import json
import logging
import re
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType, TracebackType
from typing import Any, Literal, TextIO, TypeAlias, cast

from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

from evernear.common.masking import mask

_ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


_EMOJI = r"\u2600-\u27bf\U0001f300-\U0001faff"
_EMOJI_JOINER = re.compile(rf"(?<=[\ufe0f{_EMOJI}])\u200d(?=[{_EMOJI}])")
"""The joiner within an emoji, such as that of a farmer, hides and reorders nothing there."""


def printable(text: str, limit: int | None = None) -> str:
    """``text`` on one line, with secrets masked and unprintable characters escaped as in ``\\x1b``.
    Text longer than ``limit`` characters is truncated and ends in "...". Idempotent."""
    text = mask(text)  # the beginning of a secret would not be recognized in a shortened text
    shortened = text if limit is None else text[:limit]
    joiners = {match.start() for match in _EMOJI_JOINER.finditer(shortened)}
    escaped = "".join(
        c if c.isprintable() or place in joiners else c.encode("unicode_escape").decode()
        for place, c in enumerate(shortened)
    )
    return f"{escaped}..." if len(shortened) < len(text) else escaped


NAMED = 5


def quantity(count: int, noun: str, plural: str = "") -> str:
    """``count`` and its noun, as in "1 image" and "1,200 images"."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def named(names: Sequence[str], count: int | None = None) -> str:
    """The first `NAMED` of ``names``, and the number of the others. ``names`` may be some of
    ``count`` names."""
    more = (len(names) if count is None else count) - min(len(names), NAMED)
    return ", ".join(names[:NAMED]) + (f" and {more:,} more" if more > 0 else "")


def warned(sentences: Iterable[str]) -> str:
    return "".join(f"; WARNING: {sentence}" for sentence in sentences)


def print_line(text: str = "", file: TextIO | None = None) -> None:
    print(printable(text), file=file or sys.stdout, flush=True)


def print_secret(secret: str) -> None:
    print(secret, file=getattr(sys.stdout, "unmasked", sys.stdout), flush=True)


def print_json(value: object) -> None:
    """Print ``value``, which may contain pydantic models, as one line of ASCII JSON. Bytes that are
    not UTF-8, as in file names, are escaped as in `printable`."""
    try:
        text = to_json(value, ensure_ascii=True, inf_nan_mode="null")
    except PydanticSerializationError:
        text = to_json(_without_surrogates(to_jsonable_python(value)), ensure_ascii=True, inf_nan_mode="null")
    print_line(_without_del(text.decode()))


def _without_surrogates(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            fields = cast(dict[str, Any], value)
            return {_without_surrogates(key): _without_surrogates(each) for key, each in fields.items()}
        case list():
            return [_without_surrogates(each) for each in cast(list[Any], value)]
        case _:
            return value


def _without_del(text: str) -> str:
    """Escape DEL, the only control character that JSON does not."""
    return text.replace("\x7f", "\\u007f")


class LogFormatter(logging.Formatter):
    """Prints each record on one line, and its traceback below."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        return printable(super().formatMessage(record))

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802 - logging's own name
        """A traceback's last lines quote the exception, which is untrusted."""
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


_log_fields: ContextVar[Mapping[str, object]] = ContextVar("log_fields", default=MappingProxyType({}))


@contextmanager
def log_fields(**fields: object) -> Generator[None]:
    """Add ``fields`` that are not empty, such as a request id, to this task's JSON log records."""
    token = _log_fields.set({**_log_fields.get(), **{name: value for name, value in fields.items() if value}})
    try:
        yield
    finally:
        _log_fields.reset(token)


class JsonFormatter(logging.Formatter):
    """Prints each record as one line of ASCII JSON, with the fields of `log_fields`."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_log_fields.get(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return _without_del(
            mask(json.dumps(fields, default=str))
        )  # pydantic's JSON rejects surrogates, as in file names


def log_to_stderr(level: int, log_format: Literal["text", "json"]) -> None:
    handler = logging.StreamHandler()
    lines = LogFormatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(lines if log_format == "text" else JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it warns of every retry, and the last one is an error


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    for row in table:
        print_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def root_cause(error: BaseException) -> str:
    """The innermost reason of a network error, such as "Connection refused", without the
    representations of objects in urllib3's messages."""
    reasons = [getattr(error, "reason", None), *reversed(error.args)]
    if inner := next((reason for reason in reasons if isinstance(reason, BaseException)), None):
        return root_cause(inner)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.rpartition(": ")[2].split()).rstrip(".") or type(error).__name__
