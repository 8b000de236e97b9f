"""Find blocks and commands that became part of a paragraph: fences, prompts, directives and
examples.

Markdown is searched, and so are comments and Python's docstrings.
"""

import ast
import re
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path

FENCE = re.compile(r"^\s*(?:(?:[-*]|\d+\.) +)?(?:```+|~~~+)(?P<info>[^`]*)$")
CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
PROMPT = re.compile(r"(?:^|\s)\$(?:\s|$)")
DIRECTIVE = re.compile(
    r"\S\s+(?:syntax=docker/|hadolint ignore=|pyright: [a-z]+$|(?:ruff|flake8): noqa|fmt: o|<!--|!!! |##+ |\|--)"
    r"|(?:syntax=docker/|hadolint ignore=)\S+\s+\S"
)
COLUMNS = re.compile(r"^[^\s|].*\S  +\S")
"""Not indented, and with a gap, as between a command and its explanation."""

Lines = list[tuple[int, str]]
"""Lines of text with their numbers in the file."""


def damage(path: Path) -> list[str]:
    """One phrase for each place of a file where a line break is missing, or stands within code."""
    text = path.read_text()
    lines = list(enumerate(text.splitlines(), 1))
    blocks = [lines] if path.suffix == ".md" else [*_comments(lines)]
    if path.suffix == ".py":
        blocks += _docstrings(text)
    return [f"line {number}: {reason}" for number, reason in sorted({f for block in blocks for f in _damage(block)})]


def _damage(lines: Lines) -> Iterator[tuple[int, str]]:
    prose: Lines = []
    opening = None
    for number, line in lines:
        fence = FENCE.match(line)
        if fence and " " in fence["info"].strip():
            yield number, "a fence and the text after it are one line"
        if not fence and "```" in line:
            yield number, "a fence stands inside a line"
        if opening and PROMPT.search(line.lstrip()[1:]):
            yield number, "a prompt stands inside a line"
        prose.append((number, "" if opening or fence else line))
        if fence:
            opening = None if opening else number
    if opening:
        yield opening, "the fence is not closed"
    for filled, paragraph in groupby(prose, key=lambda line: bool(line[1].strip())):
        if filled:
            yield from _damage_of_paragraph(list(paragraph))


def _damage_of_paragraph(paragraph: Lines) -> Iterator[tuple[int, str]]:
    first, _ = paragraph[0]
    text = "\n".join(line for _, line in paragraph)
    for code in CODE.finditer(text):
        if "\n" in code[0]:
            yield first + text[: code.start()].count("\n"), f"`{' '.join(code[2].split())}` is broken over lines"
    lines = CODE.sub(lambda code: "`" + "\n" * code[0].count("\n"), text).split("\n")
    for number, line in enumerate(lines, first):
        if PROMPT.search(line):
            yield number, "a prompt stands inside a paragraph"
        if DIRECTIVE.search(line):
            yield number, "a directive stands inside a paragraph"
    for number, (before, line) in enumerate(pairwise(lines), first + 1):
        if COLUMNS.match(line) and not COLUMNS.match(before) and not before.startswith(" "):
            yield number, "an example stands inside a paragraph"


def _comments(lines: Lines) -> Iterator[Lines]:
    for comment, group in groupby(lines, key=lambda line: line[1].lstrip().startswith("#")):
        if comment:
            yield [(number, line.strip().removeprefix("#").removeprefix(" ")) for number, line in group]


def _docstrings(text: str) -> Iterator[Lines]:
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            numbers = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            yield [(number, lines[number - 1][node.col_offset :].replace('"""', "")) for number in numbers]
