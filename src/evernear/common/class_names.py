"""Normalize class names that look the same, and display class names so that they can be told
apart.

Accented letters in folder names are in decomposed form on macOS (``e`` and an accent), but in
composed form on other systems (``é``). A space at the end of a name is invisible. A byte-by-byte
comparison would treat two spellings of a name as different classes.
"""

import unicodedata

_SPACES = "".join(char for char in map(chr, range(0x3001)) if char.isspace())
_INVISIBLE = "\u061c\u200b\u200e\u200f\u2060\ufeff"  # direction marks, zero-width space, word joiner, byte order mark
_IGNORED = frozenset({"\u034f", *map(chr, range(0xFE00, 0xFE10))})  # grapheme joiner, variation selectors


def class_name(text: str) -> str:
    """``text`` in composed form (Unicode NFC), without leading or trailing spaces and invisible
    characters.

    Letter case is preserved, because handwriting datasets have the classes ``a`` and ``A``.
    """
    return trimmed(unicodedata.normalize("NFC", text))


def trimmed(text: str) -> str:
    """``text`` without leading or trailing spaces and invisible characters."""
    return text.strip(_SPACES + _INVISIBLE)


def lookalike_key(name: str) -> str:
    """A comparison key, which is equal for names that differ only in case, width, spaces or
    invisible characters."""
    folded = unicodedata.normalize("NFKC", name).casefold()
    visible = (char for char in folded if unicodedata.category(char) != "Cf" and char not in _IGNORED)
    return unicodedata.normalize("NFKC", " ".join("".join(visible).split()))


def spelled(name: str) -> str:
    """``name`` in quotes, with the code points of non-ASCII characters,
    as in ``'caf\\xe9' (café)``.
    """
    return ascii(name) if name.isascii() else f"{name!a} ({name})"
