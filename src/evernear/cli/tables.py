"""Tables for people."""

from collections.abc import Iterable, Sequence

from evernear.output import print_line, printable


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under their head, each column as wide as its widest cell."""
    table = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        print_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
