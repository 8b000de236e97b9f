import re

COLUMN = "column"
"""The source's own grouping: the column or the ``.json`` field ``group``."""
GROUP_FORMS = ("folder", "stem", COLUMN)
"""Values of ``data.group`` that are not regular expressions."""


def check_group(setting: str) -> str:
    """Accept "", one of `GROUP_FORMS`, or a regular expression with a group in parentheses.

    Raises:
        ValueError: ``setting`` is none of these.
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
    return setting
