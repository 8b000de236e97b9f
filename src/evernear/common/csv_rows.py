"""Read CSV files as spreadsheets and databases write them."""

import csv
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from evernear.common.disk import disk_errors
from evernear.errors import DataError

_MAX_NAMES = 5


def csv_rows(file: Path, name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of each row of a CSV file that is named
    ``name`` in messages. The first row names the columns. Empty rows are skipped.

    The file is encoded in UTF-8 or UTF-16 and separated by commas, semicolons or tabs.
    Memory does not grow with the file.

    Raises:
        DataError: the file is not CSV, or a row has too many or too few cells.
    """
    with disk_errors(file):
        with file.open("rb") as start:
            begin = start.read(2)
        encoding = "utf-16" if begin in (BOM_UTF16_LE, BOM_UTF16_BE) else "utf-8-sig"
        with file.open(encoding=encoding, newline="") as text:
            lines = 0
            try:
                header = text.readline()
                text.seek(0)
                # Excel separates columns with semicolons in locales whose decimal
                # separator is a comma.
                reader = csv.reader(text, delimiter=max(",;\t", key=header.count), strict=True)
                columns = next(reader, [])
                lines = reader.line_num
                yield lines, columns
                for cells in reader:
                    lines = reader.line_num
                    if not cells:
                        continue
                    if len(cells) != len(columns):
                        raise DataError(
                            f"Line {lines:,} of {name} has {len(cells)} of {len(columns)} columns; put a value that"
                            ' contains the separator in quotes ("), and leave a missing one empty.'
                        )
                    yield lines, cells
            except UnicodeError:
                raise DataError(
                    f"{name} is not UTF-8 after line {lines:,}; save it as CSV UTF-8, or convert it with `iconv`."
                ) from None
            except csv.Error as error:
                raise DataError(f"{name} is not valid CSV after line {lines:,} ({error}); correct it.") from None


def column_positions(
    columns: Sequence[str], name: str, required: Sequence[str], optional: Sequence[str] = ()
) -> Mapping[str, int]:
    """The position of each ``required`` or ``optional`` column in the first row of the
    file ``name``. Letter case and spaces around a column's name are ignored.

    Raises:
        DataError: a required column is missing, or a known column occurs twice.
    """
    plain = [column.strip().casefold() for column in columns]
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
