"""Class names and CSV files as people, spreadsheets and databases write them.

macOS decomposes accented letters in folder names (``e`` and an accent), other systems compose them
(``é``), and a space at the end is invisible. As bytes, such spellings are different classes.
"""

import csv
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from evernear.common.disk import disk_errors, require_no_pointer
from evernear.errors import DataError

_SPACES = "".join(char for char in map(chr, range(0x3001)) if char.isspace())
_INVISIBLE = "\u061c\u200b\u200e\u200f\u2060\ufeff"  # direction marks, zero-width space, word joiner, byte order mark
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
_IGNORED = frozenset({"\u034f", *map(chr, range(0xFE00, 0xFE10))})  # grapheme joiner, variation selectors


def class_name(text: str) -> str:
    """``text`` in composed form (Unicode NFC), without spaces and invisible characters at its ends.
    Case is preserved, because handwriting datasets have the classes ``a`` and ``A``."""
    return trimmed(unicodedata.normalize("NFC", text))


def require_one_line(name: str, where: str) -> str:
    """The class name ``name``, if it has no line break or other control character. ``where`` names
    its place. Two lines are two labels, and an image has one."""
    if _CONTROL.search(name):
        raise DataError(
            f"{where} is {name!a}, which has a line break or another control character; write one name on one line."
        )
    return name


def trimmed(text: str) -> str:
    return text.strip(_SPACES + _INVISIBLE)


def lookalike_key(name: str) -> str:
    """Equal for names that differ only in case, width, spaces or invisible characters."""
    folded = unicodedata.normalize("NFKC", name).casefold()
    visible = (char for char in folded if unicodedata.category(char) != "Cf" and char not in _IGNORED)
    return unicodedata.normalize("NFKC", " ".join("".join(visible).split()))


def spelled(name: str) -> str:
    """``name`` in quotes, with non-ASCII characters' code points, as in ``'caf\\xe9' (café)``."""
    return ascii(name) if name.isascii() else f"{name!a} ({name})"


def unknown_name(name: str, known: Collection[str]) -> str:
    """The end of a sentence that rejects ``name``: the one among ``known`` that may be meant, if
    any. The name of a setting may lack its section."""
    names = {each.rpartition(".")[2]: each for each in known} | {each: each for each in known}
    close = get_close_matches(name, names, n=1)
    return f"did you mean {names[close[0]]!r}?" if close else "remove it, or correct its name."


_MAX_NAMES = 5
_UTF_8 = "utf-8-sig"
_SEPARATOR_LINE = re.compile(r'"?sep=(.)[\s,;"]*', re.IGNORECASE)
_TEXT_FORMULA = re.compile(r'="([^"]*)"')
"""A number written as a formula, so that a spreadsheet keeps its leading zeros."""


def csv_rows(file: Path, name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of each row. The first row names the columns.

    The file is in UTF-8 or UTF-16, separated by commas, semicolons or tabs, or by the separator in
    Excel's first line ``sep=;``. Spaces around a value, and empty columns and rows at the end, are
    dropped. Memory does not grow with the file.
    """
    require_no_pointer(file, name)
    with disk_errors(file), file.open(encoding=_encoding(file), newline="") as text:
        lines = 0
        try:
            first = next((line for line in text if line.strip()), "")
            text.seek(0)
            declared = _SEPARATOR_LINE.fullmatch(first)
            # Excel separates columns with semicolons in locales whose decimal separator is a comma.
            delimiter = declared[1] if declared else max(",;\t", key=first.count)
            reader = csv.reader(text, delimiter=delimiter, strict=True, skipinitialspace=True)
            rows = filter(any, ([_value(cell) for cell in cells] for cells in reader))
            if declared:
                next(rows)
            columns = _without_empty_end(next(rows, []))
            lines = reader.line_num
            yield lines, columns
            for cells in rows:
                lines = reader.line_num
                # Excel leaves out separators of empty cells at the end of a row.
                if len(_without_empty_end(cells)) > len(columns) or len(cells) == 1 < len(columns):
                    raise DataError(
                        f"Line {lines:,} of {name} has {len(cells)} of {len(columns)} columns; put a value that"
                        ' contains the separator in quotes ("), and leave a missing one empty.'
                    )
                yield lines, (cells + [""] * len(columns))[: len(columns)]
        except UnicodeError:
            line = _undecodable_line(file) if text.encoding == _UTF_8 else 0
            where = f"Line {line:,} of {name}" if line else name
            raise DataError(f"{where} is not UTF-8; save it as CSV UTF-8, or convert it with `iconv`.") from None
        except csv.Error as error:
            raise DataError(f"{name} is not valid CSV after line {lines:,} ({error}); correct it.") from None


def _encoding(file: Path) -> str:
    """UTF-8, unless the file begins like UTF-16."""
    with file.open("rb") as start:
        match [*start.read(2)]:
            case [0xFF, 0xFE] | [0xFE, 0xFF]:
                return "utf-16"
            case [_, 0]:
                return "utf-16-le"
            case [0, _]:
                return "utf-16-be"
            case _:
                return _UTF_8


def _undecodable_line(file: Path) -> int:
    """The number of the first line that is not UTF-8. The reader decodes blocks, not lines."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode()
            except UnicodeError:
                return number
    return 0


def _value(cell: str) -> str:
    value = trimmed(cell)
    formula = _TEXT_FORMULA.fullmatch(value)
    return trimmed(formula[1]) if formula else value


def _without_empty_end(cells: list[str]) -> list[str]:
    return cells[: max((number for number, cell in enumerate(cells, 1) if cell), default=0)]


def column_positions(
    columns: Sequence[str], name: str, required: Sequence[str], optional: Sequence[str] = ()
) -> Mapping[str, int]:
    """Positions in the first row, ignoring case, spaces and invisible characters."""
    plain = [lookalike_key(column) for column in columns]
    known = [*required, *optional]
    if missing := [column for column in required if column not in plain]:
        shown = ", ".join(repr(column) for column in columns[:_MAX_NAMES])
        more = " and more" if len(columns) > _MAX_NAMES else ""
        maybe = f" (and optionally {' and '.join(optional)})" if optional else ""
        raise DataError(
            f"{name} has no column {' and no column '.join(missing)}, but {shown or 'no columns'}{more}; call the"
            f" columns {' and '.join(required)}{maybe} in its first row."
        )
    if twice := [column for column in known if plain.count(column) > 1]:
        raise DataError(f"{name} has two columns called {twice[0]}; rename or remove one.")
    return {column: plain.index(column) for column in known if column in plain}
