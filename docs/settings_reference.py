"""The page "Settings", generated from the models of `evernear.settings`."""

from collections.abc import Iterator
from importlib import resources
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from evernear.settings import Settings
from evernear.settings.section import Section
from evernear.settings.sources import presets
from evernear.settings.validation import RULES, ValidationSettings

INTRODUCTION = """\
# Settings

Every setting has a default. Later sources override earlier ones: the defaults, `--preset`, the working directory's
[`evernear.toml`](your-images.md#settings-of-a-working-directory), `--config FILE` (TOML), the environment
(`EVERNEAR_TRAIN__EPOCHS=3`), `--set train.epochs=3`. An unknown key is an error that suggests the closest valid one.
The variables that Kubernetes sets in pods for a Service `evernear-*`, such as `EVERNEAR_PREP_SERVICE_HOST`, are
ignored. Secrets are not settings: [S3 keys](object-store.md) and tokens come from the environment or from files.

This page is generated from the models in `evernear.settings` when the site is built.
"""


def settings_page() -> str:
    """The whole page, as Markdown."""
    blocks = [INTRODUCTION, "## General\n", _table(Settings, "")]
    for name, section in _sections(Settings):
        blocks += [f"## {name}\n", f"{_first_line(section)}\n", _table(section, f"{name}.")]
        blocks += [_rules()] if section is ValidationSettings else []
    blocks += ["## Presets\n", "`--preset NAME` sets these values, which every later source may override.\n"]
    for name in presets():
        content = resources.files("evernear.settings").joinpath("presets", f"{name}.toml").read_text()
        blocks.append(f"### {name}\n\n```toml\n{content.strip()}\n```\n")
    return "\n".join(blocks)


def settings() -> Iterator[tuple[str, FieldInfo]]:
    """Every setting with its full name, such as ``train.epochs``."""
    yield from _values(Settings, "")
    for name, section in _sections(Settings):
        yield from _values(section, f"{name}.")


def _sections(model: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield name, field.annotation


def _values(model: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    nested = {name for name, _ in _sections(model)}
    for name, field in model.model_fields.items():
        if name not in nested:
            yield prefix + name, field


def _table(model: type[Section], prefix: str) -> str:
    rows = [
        f"| `{name}` | {_cell(_type(field))} | {_cell(_default(field))} | {_cell(field.description or '')} |"
        for name, field in _values(model, prefix)
    ]
    return "\n".join(["| setting | type | default | |", "|---|---|---|---|", *rows, ""])


def _rules() -> str:
    rows = [f"| `{name}` | {rule.severity} | {_cell(rule.description)} |" for name, rule in RULES.items()]
    return "\n".join(["| rule | default severity | |", "|---|---|---|", *rows, ""])


def _first_line(section: type[Section]) -> str:
    return (section.__doc__ or "").strip()


def _type(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(each, name)}"
        for each in field.metadata
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if getattr(each, name, None) is not None
    ]
    return ", ".join([_name(field.annotation), *bounds])


def _name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    arguments = [each for each in get_args(annotation) if each not in (NoneType, ...)]
    if isinstance(annotation, UnionType):
        return " or ".join(map(_name, arguments))
    if arguments:
        return f"{get_origin(annotation).__name__} of {', '.join(map(_name, arguments))}"
    return getattr(annotation, "__name__", str(annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "empty" if value in ("", (), {}, None) else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|").replace("\n", " ")
