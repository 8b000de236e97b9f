"""Check ``data.group``. Matching must be fast even on file names that a third party
chose."""

import re

COLUMN = "column"
"""The grouping that the source itself provides: the column ``group`` of a table or a
Parquet file, or the field ``group`` of a WebDataset's ``.json``.
"""
GROUP_FORMS = ("folder", "stem", COLUMN)
"""Values of ``data.group`` that are not regular expressions."""
_MAX_REPEATS = 5
_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?P<\w+>|\(\?[:#=!<>-]?[=!a-zA-Z-]*:?|[*+{(|)]", re.DOTALL)


def check_group(setting: str) -> str:
    """Check that ``setting`` is empty, one of `GROUP_FORMS`, or a regular expression
    with a group in parentheses.

    Raises:
        ValueError: ``setting`` is none of these, or the time to match it may grow
            exponentially with the length of a name.
    """
    if not setting or setting in GROUP_FORMS:
        return setting
    forms = " or ".join(GROUP_FORMS)
    try:
        pattern = re.compile(setting)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{setting!r} is neither {forms} nor a regular expression ({error})") from None
    if not pattern.groups:
        raise ValueError(
            f"{setting!r} has no parentheses around the part of the name that the images of a group share, as in"
            f" ([^/]+)/[^/]+$; use {forms}, or add them"
        )
    if reason := _slow(setting):
        raise ValueError(f"{setting!r} {reason}, so that one name could take hours to match; write a simpler one")
    return setting


def _slow(pattern: str) -> str:
    """Explain why matching ``pattern`` may take long, or return an empty string if
    matching is fast.

    Matching a repeat or an alternation inside a repeat may take exponential time.
    Matching consecutive repeats takes polynomial time (Davis et al. 2018, ESEC/FSE,
    "The impact of regular expression denial of service").
    """
    # For each open parenthesis, whether its content has a repeat or an alternation.
    varies, repeats, closed = [False], 0, False
    for token in _TOKENS.finditer(pattern):
        text, adjacent = token.group(), closed and pattern[token.start() - 1] == ")"
        closed = False
        if text.startswith("("):
            varies.append(False)
        elif text == ")":
            inner = varies.pop()
            varies[-1], closed = varies[-1] or inner, inner
        elif text in "*+{":
            if adjacent:
                return "repeats a part that contains a repeat or a choice"
            repeats += 1
            varies[-1] = True
        elif text == "|":
            varies[-1] = True
    return f"contains more than {_MAX_REPEATS} repeats" if repeats > _MAX_REPEATS else ""
