"""The sources of settings, and the error messages for invalid settings."""

import os
import re
import tomllib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource

from evernear.common.masking import has_form_of_secret
from evernear.common.output import printable
from evernear.common.text import unknown_name
from evernear.errors import SettingsError

ENV_PREFIX = "EVERNEAR_"
TESTS_PREFIX = "EVERNEAR_TEST_"
"""Prefix of variables that enable optional tests, which all processes of a test inherit."""
TOKEN_VARIABLE = "EVERNEAR_TOKEN"  # noqa: S105 - a name, not a token
TOKEN_FILE_VARIABLE = "EVERNEAR_TOKEN_FILE"  # noqa: S105
IMAGE_VARIABLE = "EVERNEAR_IMAGE"
"""The image of the pipeline's pods, which steps on several nodes also use."""
SERVICE_URL_VARIABLE = "EVERNEAR_SERVICE_URL"
"""URL with which a deployment from outside the cluster reaches the serving Service."""
MILVUS_URI_VARIABLE = "EVERNEAR_MILVUS_URI"
MILVUS_TOKEN_VARIABLE = "EVERNEAR_MILVUS_TOKEN"  # noqa: S105
MILVUS_TOKEN_FILE_VARIABLE = "EVERNEAR_MILVUS_TOKEN_FILE"  # noqa: S105
_NOT_SETTINGS = (
    TOKEN_VARIABLE,
    TOKEN_FILE_VARIABLE,
    IMAGE_VARIABLE,
    SERVICE_URL_VARIABLE,
    MILVUS_URI_VARIABLE,
    MILVUS_TOKEN_VARIABLE,
    MILVUS_TOKEN_FILE_VARIABLE,
)
_SERVICE_LINK = re.compile(
    r"EVERNEAR(_[A-Z0-9_]+)?_"
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""Variables that Kubernetes sets in every pod for a Service ``evernear`` or ``evernear-*``."""
Model = TypeVar("Model", bound=BaseModel)
Tree = dict[str, Any]
_FORMS = {
    "tuple_type": 'it is a list, as in ["a", "b"]',
    "dict_type": 'it is a table, as in {"key": "value"}',
    "model_type": "it is a section; write its settings as section.key=value",
}
"""How to write a value. pydantic's own messages name only the type."""


class _TextSource(EnvSettingsSource):
    """Settings as text, from variables or ``--set``, with names like ``train__epochs``."""

    def __init__(self, model: type[BaseModel], values: Mapping[str, str]) -> None:
        self._values = values
        super().__init__(model, env_prefix="", env_nested_delimiter="__")  # pyright: ignore[reportArgumentType] - reads fields only

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return dict(self._values)

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """Parse JSON. Validation reports anything else with the setting's full name."""
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            return value

    def __call__(self) -> Tree:
        unknown = {name: value for name, value in self._values.items() if name.partition("__")[0] not in self._fields}
        return _with_none(super().__call__() | unknown)

    @property
    def _fields(self) -> dict[str, FieldInfo]:
        return self.settings_cls.model_fields


def _with_none(value: Any) -> Any:
    """``value`` with None for ``null``, which clears a setting of a lower source."""
    if isinstance(value, dict):
        return {key: _with_none(inner) for key, inner in value.items()}
    return None if value == "null" else value


def preset(model: type[BaseModel], name: str) -> Tree:
    if name not in presets():
        raise SettingsError(f"No preset {name!r}; known: {', '.join(presets())}.")
    with resources.as_file(resources.files("evernear.settings") / "presets" / f"{name}.toml") as path:
        return toml_file(model, path)


def presets() -> list[str]:
    return sorted(p.name.removesuffix(".toml") for p in (resources.files("evernear.settings") / "presets").iterdir())


def toml_file(model: type[BaseModel], path: Path) -> Tree:
    try:
        return tomllib.loads(text_of(path.expanduser().read_bytes()))
    except OSError as error:
        raise SettingsError(f"Cannot read the settings file {path}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"The settings file {path} is not TOML: {error}.") from None


def text_of(data: bytes) -> str:
    """Decode UTF-8, or UTF-16 with a byte order mark, which PowerShell writes."""
    return data.decode("utf-16" if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig")


def environment(model: type[BaseModel], variables: Mapping[str, str] = os.environ) -> Tree:
    """The settings in variables such as ``EVERNEAR_TRAIN__EPOCHS``, without Kubernetes' own."""
    values = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in variables.items()
        if name.startswith(ENV_PREFIX) and not name.startswith(TESTS_PREFIX) and name not in _NOT_SETTINGS
        if not _is_service_link(model, name, value)
    }
    return _TextSource(model, values)()


def _is_service_link(model: type[BaseModel], name: str, value: str) -> bool:
    """Whether Kubernetes set a variable. One that could be a misspelled setting counts as set by it
    only if the value contains ``://``, so ``EVERNEAR_PREP_PORT=8090`` is an error."""
    if "__" in name or not _SERVICE_LINK.fullmatch(name):
        return False
    key = name.removeprefix(ENV_PREFIX).lower()
    return key not in (known.replace(".", "_") for known in known_keys(model)) or "://" in value


def assignments(model: type[BaseModel], words: Iterable[str]) -> Tree:
    """Parse words such as ``train.epochs=3``. The last assignment to a setting wins."""
    tree: Tree = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise SettingsError(f"--set {word!r} has no '='; write --set section.key=value.")
        merge(tree, _TextSource(model, {key.strip().replace(".", "__"): value})())
    return tree


def merge(into: Tree, tree: Mapping[str, Any]) -> None:
    """Merge ``tree`` into ``into``, key by key, also in nested mappings."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            current = into.get(key)
            into[key] = dict(current) if isinstance(current, dict) else {}  # a copy: other trees may share the dict
            merge(into[key], value)
        else:
            into[key] = value


def flat(tree: Mapping[str, Any], prefix: str = "") -> Tree:
    """Flatten ``{"train": {"epochs": 3}}`` to ``{"train.epochs": 3}``."""
    leaves: Tree = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return leaves


def parse(model: type[Model], tree: Mapping[str, Any]) -> Model:
    """Validate ``tree``. Unknown keys, invalid values and secrets raise `SettingsError`."""
    require_no_secret(tree)
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(_sentence(model, error)) from None


def require_no_secret(tree: Mapping[str, Any]) -> None:
    """Reject secrets, because settings are visible in Kubeflow Pipelines and in records."""
    for name, value in flat(tree).items():
        text = str(value)
        if has_form_of_secret(text):
            raise SettingsError(
                f"Setting {name} = {printable(text, 100)} contains a secret, and records of runs show settings. Remove "
                "it from the value: secrets come from the environment or mounted files, such as AWS_SECRET_ACCESS_KEY "
                "for a bucket."
            )


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """The names of all settings of ``model``, as in ``section.key``."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += known_keys(field.annotation, f"{prefix}{name}.")
    return keys


def _description(model: type[BaseModel], names: tuple[int | str, ...]) -> str:
    """The description of the setting whose sections and name are given in order."""
    field = model.model_fields[str(names[0])]
    if len(names) > 1 and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
        return _description(field.annotation, names[1:])
    return re.sub(r"(?<!\.)\.$", "", field.description or "")


def _sentence(model: type[BaseModel], error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in fault["loc"]).replace("__", ".")
    if fault["type"] != "extra_forbidden":
        reason = fault["msg"].removeprefix("Value error, ")
        message = _FORMS.get(fault["type"]) or reason[0].lower() + reason[1:]
        if pattern := fault.get("ctx", {}).get("pattern"):
            message = f"it does not match {pattern} ({_description(model, fault['loc'])})"
        if not key:  # several sections contradict each other
            return f"Invalid settings: {message}."
        # Settings of a section may contradict each other.
        value = "" if isinstance(fault["input"], dict) else f" = {printable(str(fault['input']), 100)}"
        return f"Invalid setting {key}{value}: {message}" + "." * (message[-1] not in "?.")
    return f"No setting {key!r}; {unknown_name(key, known_keys(model))}"
