"""Normalize class names that look the same, and display names so that they can be told apart.

macOS decomposes accented letters in folder names (``e`` and an accent), other systems compose them
(``é``), and a space at the end is invisible. As bytes, such spellings are different classes.
"""

import unicodedata

_SPACES = "".join(char for char in map(chr, range(0x3001)) if char.isspace())
_INVISIBLE = "\u061c\u200b\u200e\u200f\u2060\ufeff"  # direction marks, zero-width space, word joiner, byte order mark
_IGNORED = frozenset({"\u034f", *map(chr, range(0xFE00, 0xFE10))})  # grapheme joiner, variation selectors


def class_name(text: str) -> str:
    """``text`` in composed form (Unicode NFC), without spaces and invisible characters at its ends.
    Case is preserved, because handwriting datasets have the classes ``a`` and ``A``."""
    return trimmed(unicodedata.normalize("NFC", text))


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
