"""Class names: one spelling for names that look the same,
and a way to display similar names.

macOS writes letters of a folder name in decomposed form (``e`` and an accent), and
other systems in composed form (``é``). A space at the end of a name is invisible. Byte
by byte, such names would be different classes.
"""

import unicodedata

_SPACES = "".join(char for char in map(chr, range(0x3001)) if char.isspace())
_INVISIBLE = "\u061c\u200b\u200e\u200f\u2060\ufeff"  # direction marks, zero-width space, word joiner, byte order mark
_IGNORED = frozenset({"\u034f", *map(chr, range(0xFE00, 0xFE10))})  # grapheme joiner, variation selectors


def class_name(text: str) -> str:
    """``text`` in composed form (Unicode NFC),
    without spaces and invisible characters at the ends.

    Letter case does not change, because handwriting datasets have the classes ``a`` and
    ``A``.
    """
    return unicodedata.normalize("NFC", text).strip(_SPACES + _INVISIBLE)


def lookalike_key(name: str) -> str:
    """A key that names share if they differ only in case, width,
    spaces or invisible characters.
    """
    folded = unicodedata.normalize("NFKC", name).casefold()
    visible = (char for char in folded if unicodedata.category(char) != "Cf" and char not in _IGNORED)
    return unicodedata.normalize("NFKC", " ".join("".join(visible).split()))


def spelled(name: str) -> str:
    """``name`` in quotes, with the code points of non-ASCII characters,
    as in ``'caf\\xe9' (café)``.
    """
    return ascii(name) if name.isascii() else f"{name!a} ({name})"
