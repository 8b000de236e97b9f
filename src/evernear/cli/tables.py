"""Tables for people."""

from collections.abc import Iterable, Sequence


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under their head, each column as wide as its widest cell."""
    table = [head, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
