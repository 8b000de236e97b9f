"""Runs of pipelines, and their parameters, which need no client of Kubeflow Pipelines.

Parameters come from ``key=value`` words, this process's settings, and the caller. Keys are setting
names, as in ``section.key``. A setting that is a pipeline parameter
(`evernear.settings.PARAMETERS`) also has the parameter's name. Only those that are set are sent.
The others keep the pipeline's defaults, which may have been set at upload.
"""

import json
import os
import shlex
from collections.abc import Container, Mapping, Sequence
from enum import StrEnum
from typing import Any

from pydantic import AwareDatetime

from evernear.common.frozen import Frozen
from evernear.common.store import Store
from evernear.common.text import unknown_name
from evernear.errors import SettingsError
from evernear.kubeflow import NAMES
from evernear.kubeflow.parameters import nonempty, resolve, settings_of
from evernear.release.promotions import whoami
from evernear.reporting.notify import RunOutcome, load_outcome
from evernear.settings import PARAMETERS, OneRun, PipelineSettings, RunSettings, Settings, merge, overrides_from
from evernear.settings.sources import known_keys, require_no_secret

STARTED_BY = "started_by"
"""The parameter that a start sends if the pipeline records it."""
_BY_KEY = {key: name for name, key in PARAMETERS.items()}
_QUOTES = str.maketrans({"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'"})
"""Typographic quotes, which Slack's clients insert."""
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "STRING": ("text", (str,)),
    "NUMBER_INTEGER": ("a whole number", (int,)),
    "NUMBER_DOUBLE": ("a number", (int, float)),
    "BOOLEAN": ("true or false", (bool,)),
    "STRUCT": ("a JSON object", (dict,)),
    "LIST": ("a JSON list", (list, tuple)),
}
"""The types of parameter values in words and in Python, by KFP type."""


class State(StrEnum):
    """KFP's runtime states, in lower case."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    SKIPPED = "skipped"
    FAILED = "failed"
    CANCELING = "canceling"
    CANCELED = "canceled"
    PAUSED = "paused"

    @property
    def is_final(self) -> bool:
        return self in (State.SUCCEEDED, State.SKIPPED, State.FAILED, State.CANCELED)


class KfpStep(Frozen):
    name: str
    state: State
    started: AwareDatetime | None = None
    ended: AwareDatetime | None = None
    error: str = ""


class Run(Frozen):
    id: str
    """KFP's run ID, also the name of its `evernear.common.run_record.RunRecord`."""
    name: str
    pipeline: str
    pipeline_version: str
    state: State
    created: AwareDatetime
    ended: AwareDatetime | None = None
    parameters: dict[str, Any] = {}
    key: str = ""
    """The idempotency key with which the run was started."""
    error: str = ""
    url: str = ""
    """The run's page in the KFP UI, or an empty string if the UI's URL is unknown."""
    steps: tuple[KfpStep, ...] = ()
    """In start order. Only `evernear.kubeflow.client.KfpRuns.show` sets them."""


class Parameter(Frozen):
    name: str
    type: str
    """STRING, NUMBER_INTEGER, NUMBER_DOUBLE, BOOLEAN, STRUCT or LIST."""
    default: Any = None
    description: str = ""
    required: bool = False

    def accepts(self, value: object) -> bool:
        _, types = _TYPES.get(self.type, ("", ()))
        return isinstance(value, types) and (self.type == "BOOLEAN" or not isinstance(value, bool))


def from_settings(settings: Settings, known: Sequence[Parameter]) -> dict[str, Any]:
    """The run arguments that ``settings`` sets, limited to the pipeline's parameters (``known``).
    The store is always sent, because the caller reads the outcome from it. The ``local`` target is
    not, because it means this machine, not the cluster."""
    sections = set(RunSettings.model_fields) - {"workdir", "store", "target"}
    tree: dict[str, Any] = settings.model_dump(mode="json", include=sections, exclude_unset=True, exclude_none=True) | {
        "store": settings.store_uri
    }
    if settings.target != "local":
        tree["target"] = settings.target
    arguments: dict[str, Any] = {}
    names = {parameter.name for parameter in known}
    for name, dotted in PARAMETERS.items():
        if _is_setting(name, names):
            continue
        section, _, key = dotted.rpartition(".")
        values: dict[str, Any] = tree.get(section, {}) if section else tree
        if value := values.pop(key, ""):
            arguments[name] = value
    if overrides := {section: values for section, values in tree.items() if values}:
        arguments["settings"] = overrides
    return {name: value for name, value in arguments.items() if name in names}


def from_words(
    words: Sequence[str], known: Sequence[Parameter], allowed: Sequence[str] | None = None
) -> dict[str, Any]:
    """Convert ``key=value`` words to run arguments."""
    by_name = {parameter.name: parameter for parameter in known}
    arguments: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise SettingsError(f"{word!r} has no '='; write key=value.")
        if _is_setting(_BY_KEY.get(key, key), by_name):
            key, name = PARAMETERS.get(key, key), "settings"
        else:
            name = key if key in by_name else _BY_KEY.get(key, "settings" if key in _setting_keys() else "")
        if name not in by_name:
            raise SettingsError(_unknown(key, by_name))
        if allowed is not None and key not in allowed:
            raise SettingsError(f"{key!r} cannot be set from here; these can: {', '.join(allowed)}.")
        if name == "settings" and key != "settings":
            merge(arguments, {"settings": overrides_from([f"{key}={text}"])})
        else:
            merge(arguments, {name: _value(by_name[name], text)})
    require_no_secret(arguments)
    return arguments | _validate_settings(arguments, by_name)


def to_start(pipeline: str, known: Sequence[Parameter], started_by: str, *given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a run of ``pipeline``: ``given``, each over those before it, and who starts
    it. Raises `SettingsError` if it is known that the run would fail."""
    arguments = combine({STARTED_BY: started_by}, *given)
    if pipeline in NAMES:
        parameters = combine({parameter.name: parameter.default for parameter in known}, nonempty(arguments))
        resolve(parameters)
        if pipeline == "promote" and parameters.get("release"):
            from evernear.deployment import require_reason

            require_reason(parameters.get("reason", ""))
    return arguments


def for_pipeline(arguments: Mapping[str, Any], known: Sequence[Parameter]) -> dict[str, Any]:
    """The ``arguments`` for several pipelines that one of them takes."""
    names = {parameter.name for parameter in known}
    own = {name: value for name, value in arguments.items() if name in names}
    for name in filter(arguments.get, PARAMETERS):
        if _is_setting(name, names):
            image = overrides_from([f"{PARAMETERS[name]}={arguments[name]}"])
            own["settings"] = combine(own.get("settings", {}), image)
    return own


def _is_setting(name: str, names: Container[str]) -> bool:
    """Whether a pipeline with the parameters ``names`` takes another's parameter as a setting, as
    promote and rollback take the serving image."""
    return name == "serving_image" and name not in names and "target" in names


def outcome_of(store: Store, run: Run) -> RunOutcome | None:
    """The outcome of a run that has ended. Only KFP knows that someone stopped it there."""
    outcome = load_outcome(store, run.id) if run.state.is_final else None
    if run.state is State.CANCELED and outcome is not None and outcome.state == "failed":
        stopped = {"state": "stopped", "step": "", "reasons": ("in Kubeflow Pipelines.",)}
        return outcome.model_copy(update=stopped)
    return outcome


def split_words(text: str) -> list[str]:
    """Split a typed line into words as a shell does."""
    try:
        return shlex.split(text.translate(_QUOTES))
    except ValueError:
        raise SettingsError(f"{text!r} ends in a backslash, or a quote in it is not closed.") from None


def combine(*arguments: Mapping[str, Any]) -> dict[str, Any]:
    combined: dict[str, Any] = {}
    for mapping in arguments:
        merge(combined, mapping)
    return combined


def caller() -> str:
    """A GitHub Actions workflow and its actor, or a user and host."""
    if os.environ.get("GITHUB_ACTIONS") == "true":
        environment = {name: os.environ.get(f"GITHUB_{name}", "") for name in ("EVENT_NAME", "SHA", "ACTOR", "RUN_ID")}
        return (
            f"GitHub Actions ({environment['EVENT_NAME']} of commit {environment['SHA'][:12]} by "
            f"{environment['ACTOR']}, workflow run {environment['RUN_ID']})"
        )
    return whoami()


def _validate_settings(arguments: Mapping[str, Any], by_name: Mapping[str, Parameter]) -> dict[str, Any]:
    """Validate the arguments that are settings, and convert those in ``settings`` to their types.
    They are validated with the pipeline's defaults, because one may depend on others."""
    defaults = {name: parameter.default for name, parameter in by_name.items()}
    settings = settings_of(combine(defaults, arguments))
    if "settings" not in arguments:
        return {}
    return {"settings": _selected(settings.model_dump(mode="json"), arguments["settings"])}


def _selected(settings: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """The part of ``settings`` with the sections and keys of ``keys``."""
    return {
        name: {key: settings[name][key] for key in value} if isinstance(value, Mapping) else settings[name]
        for name, value in keys.items()
    }


def _setting_keys() -> list[str]:
    return [key for key in known_keys(OneRun) if "." in key or key in ("reread", "moved_from")]


def _unknown(key: str, by_name: Mapping[str, Parameter]) -> str:
    if (name := key.removeprefix("pipeline.")) in PipelineSettings().cluster:
        return (
            f"{key} describes the cluster, so it is not a parameter of a run; set it with "
            f"`evernear pipeline upload --set pipeline.{name}=VALUE`."
        )
    if key in _setting_keys() or key in _BY_KEY:
        return (
            f"The pipeline has no parameter {key!r}. If it should, another version of evernear uploaded it; upload it "
            "again."
        )
    return f"No parameter or setting {key!r}; {unknown_name(key, [*by_name, *_setting_keys()])}"


def _value(parameter: Parameter, text: str) -> Any:
    if parameter.type == "STRING":
        return text
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # NaN would become null before the run starts
    except (ValueError, RecursionError):
        value = None
    if not parameter.accepts(value):
        raise SettingsError(f"{parameter.name} = {text!r} is not {_TYPES[parameter.type][0]}.")
    return value
