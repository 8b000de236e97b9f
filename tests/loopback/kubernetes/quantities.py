"""Resource quantities such as 500m and 2Gi."""

from decimal import Decimal

_BINARY = {f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)}
_DECIMAL = {"n": -3, "u": -2, "m": -1, "": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


def value(quantity: object) -> Decimal:
    """Return the numeric value of a quantity."""
    text = str(quantity)
    number, suffix = _split(text)
    if suffix in _BINARY:
        return number * _BINARY[suffix]
    return number * Decimal(1000) ** _DECIMAL[suffix]


def _split(text: str) -> tuple[Decimal, str]:
    for suffix in (*_BINARY, *filter(None, _DECIMAL)):
        # 1E is an exabyte and 1E3 a thousand: a suffix is always at the end.
        if text.endswith(suffix):
            return Decimal(text.removesuffix(suffix)), suffix
    return Decimal(text), ""
