"""The parameters of a run: those that the settings of this process speak of, and those that a person types.

Both are held against the parameters that the pipeline itself declares.
"""

import difflib
import json
import shlex
from collections.abc import Sequence
from typing import Any

from evernear.errors import SettingsError
from evernear.settings import Settings
from evernear.triggers.runs import Parameter

_SECTIONS = {
    "data": "data",
    "validation": "validation",
    "train_settings": "train",
    "index_settings": "index",
    "evaluation": "evaluation",
    "gate_settings": "gate",
    "serving": "serving",
    "kubernetes_settings": "kubernetes",
}
"""The pipelines' parameters that are sections of the settings."""
_QUOTES = str.maketrans({"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'"})
"""Slack's clients turn straight quotes into these."""


def configured(settings: Settings, known: Sequence[Parameter]) -> dict[str, Any]:
    """What this process is configured to, as far as the pipeline has parameters for it.

    That is its store, since there the outcome is looked for, and each section that differs from evernear's own
    defaults, which are the pipeline's too. A target ``local`` is this machine's and no cluster's.
    """
    ours, usual = settings.model_dump(mode="json"), Settings().model_dump(mode="json")
    found = {name: ours[section] for name, section in _SECTIONS.items() if ours[section] != usual[section]}
    found |= {"store": settings.store_uri} | ({"target": settings.target} if settings.target != "local" else {})
    names = {parameter.name for parameter in known}
    return {name: value for name, value in found.items() if name in names}


def parse(text: str, known: Sequence[Parameter], allowed: Sequence[str]) -> dict[str, Any]:
    """``name=value name.key=value ...`` as parameters of a run.

    ``name.key`` sets one entry of a parameter that is a STRUCT; the others keep their default.

    Raises:
        SettingsError: a name is unknown or not among ``allowed``, or a value is of another type.
    """
    try:
        words = shlex.split(text.translate(_QUOTES))
    except ValueError:
        raise SettingsError(f"{text!r} ends in a backslash, or a quote in it is not closed.") from None
    by_name = {parameter.name: parameter for parameter in known}
    found: dict[str, Any] = {}
    for word in words:
        dotted, equals, value = word.partition("=")
        if not equals:
            raise SettingsError(f"{word!r} has no '='; write name=value.")
        name, _, key = dotted.partition(".")
        parameter = by_name.get(name)
        if parameter is None:
            near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.0)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise SettingsError(f"The pipeline has no parameter {name!r}{hint}")
        if name not in allowed:
            names = ", ".join(name for name in allowed if name in by_name) or "none"
            raise SettingsError(f"{name!r} cannot be set from Slack; what can is in slack.parameters: {names}.")
        if key:
            held = found.get(name, parameter.default)
            found[name] = _with_key(parameter, held if isinstance(held, dict) else {}, key, value)
        else:
            found[name] = _value(parameter.type, value, name)
    return found


def _with_key(parameter: Parameter, held: dict[str, Any], key: str, value: str) -> dict[str, Any]:
    if parameter.type != "STRUCT" or key not in held:
        near = difflib.get_close_matches(key, held, n=1, cutoff=0.0)
        hint = f"; did you mean {parameter.name}.{near[0]}?" if near else "."
        raise SettingsError(f"{parameter.name!r} has no entry {key!r}{hint}")
    return {**held, key: _value(_type_of(held[key]), value, f"{parameter.name}.{key}")}


def _type_of(value: Any) -> str:
    """The type of an entry. KFP tells every number within a STRUCT as a float, so they are all just numbers."""
    match value:
        case bool():
            return "BOOLEAN"
        case int() | float():
            return "NUMBER"
        case dict():
            return "STRUCT"
        case list() | tuple():
            return "LIST"
        case _:
            return "STRING"


def _value(kind: str, text: str, name: str) -> Any:
    """``text`` as a value of KFP's type ``kind``."""
    wrong = SettingsError(f"{name} = {text!r} is no {_WORDS.get(kind, kind)}.")
    if kind == "STRING":
        return text
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # what no JSON holds would be null by the time the run starts
    except (ValueError, RecursionError):
        raise wrong from None
    match kind, value:
        case "BOOLEAN", bool():
            return value
        case "NUMBER_INTEGER", int() if not isinstance(value, bool):
            return value
        case "NUMBER_DOUBLE" | "NUMBER", int() | float() if not isinstance(value, bool):
            return value
        case ("STRUCT", dict()) | ("LIST", list()):
            return value
        case _:
            raise wrong


_WORDS = {
    "NUMBER_INTEGER": "whole number",
    "NUMBER_DOUBLE": "number",
    "NUMBER": "number",
    "BOOLEAN": "true or false",
    "STRUCT": "JSON object",
    "LIST": "JSON list",
}
