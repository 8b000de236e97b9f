"""Plain-text tables."""

from collections.abc import Iterable, Sequence

from evernear.output import print_line, printable


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a header and rows, with columns padded to their widest cell."""
    table = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    for row in table:
        print_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
