"""Names of classes: one spelling for names that look the same, and a way to show those that look alike.

macOS writes the letters of a folder name decomposed (``e`` and an accent) where other systems write them composed
(``é``), and a space at the end of a name is invisible. Compared byte by byte, such names are different classes.
"""

import unicodedata

_SPACES = "".join(char for char in map(chr, range(0x3001)) if char.isspace())
_INVISIBLE = "\u061c\u200b\u200e\u200f\u2060\ufeff"  # direction marks, zero-width space, word joiner, byte order mark
_IGNORED = frozenset({"\u034f", *map(chr, range(0xFE00, 0xFE10))})  # grapheme joiner, variation selectors


def class_name(text: str) -> str:
    """``text`` in composed form (Unicode's NFC), without spaces and invisible characters at its ends.

    Letter case stays: datasets of handwriting have the classes ``a`` and ``A``.
    """
    return unicodedata.normalize("NFC", text).strip(_SPACES + _INVISIBLE)


def lookalike_key(name: str) -> str:
    """A key that names share if they differ only in case, width, spaces or characters that nobody sees."""
    folded = unicodedata.normalize("NFKC", name).casefold()
    visible = (char for char in folded if unicodedata.category(char) != "Cf" and char not in _IGNORED)
    return unicodedata.normalize("NFKC", " ".join("".join(visible).split()))


def spelled(name: str) -> str:
    """``name`` in quotes, with its code points if it contains others than ASCII, as in ``'caf\\xe9' (café)``."""
    return ascii(name) if name.isascii() else f"{name!a} ({name})"
