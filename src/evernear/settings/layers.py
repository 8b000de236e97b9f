"""The settings of one command by source, and the file that stores a working directory's.

A working directory's first run saves its command line's settings (``--source``, ``--preset``,
``--config``, ``--set``) in ``WORKDIR/evernear.toml`` for all later commands (decision 3).
"""

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from pydantic import BaseModel

from evernear.common.disk import disk_errors, write_atomically
from evernear.common.masking import mask
from evernear.errors import SettingsError, StoreError
from evernear.settings import sources
from evernear.settings.data import PATH_KINDS
from evernear.settings.section import expanded
from evernear.settings.sources import Tree, merge, parse

FILE = "evernear.toml"
DEFAULT_WORKDIR = Path("evernear-work")
OF_ONE_RUN = frozenset({"validation.max_left_out_fraction"})
"""Settings that are never kept, because they accept what the files of one run are."""
EMPTY_WORKDIR = "The working directory (--workdir or EVERNEAR_WORKDIR) is empty; name a directory."
PRESET = "preset"
"""The key of the preset, whose settings every other source may override."""
HEADER = """\
# Settings of this working directory, from the command line of its first run. Every command with this --workdir
# reads them; --config, the environment and --set override them. Edit them here, or pass other ones to a run with
# --remember.

"""
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Layers(Generic[Model]):
    """The settings of one command by source. Later sources override earlier ones."""

    model: type[Model]
    workdir: Path
    remembered: Tree | None
    """The content of ``WORKDIR/evernear.toml``, or None without one."""
    config_file: Path | None
    config: Tree
    environment: Tree
    assigned: Tree
    """``--preset``, ``--set`` and the options that set a single setting."""

    def settings(self) -> Model:
        """The combined settings. If the error is in a file, the `SettingsError` names it."""
        try:
            return self._parsed(self.remembered or {}, self.config, self.environment, self.assigned)
        except SettingsError as error:
            for path, tree in ((self.config_file, self.config), (self.file, self.remembered or {})):
                if str(error) == self._fault(tree):
                    raise SettingsError(f"{path}: {error}") from None
            raise

    def with_defaults(self, words: Iterable[str]) -> Self:
        """With assignments such as ``train.epochs=3`` for what ``--set`` does not assign."""
        return replace(self, assigned=_merged(sources.assignments(self.model, words), self.assigned))

    def named(self, section: str) -> set[str]:
        """The keys of ``section`` that this command's options, its ``--config`` or the environment
        set."""
        return {key for tree in (self.config, self.environment, self.assigned) for key in tree.get(section, {})}

    @property
    def file(self) -> Path:
        return self.workdir / FILE

    def changes(self) -> Iterator[str]:
        """Yield a line for each command-line setting that differs from the remembered value."""
        before = self._before()
        for name, value in self._explicit().items():
            if before[name] != value:
                yield f"{name}: {shown(before[name])} -> {shown(value)}"
        if (preset := self._explicit_preset()) is not None and preset != before[PRESET]:
            chosen = _leaves(self.model, sources.preset(self.model, preset))
            for name, value in _leaves(self.model, self.remembered or {}).items():
                if name in chosen and name not in self._explicit():
                    yield f"{name}: stays {shown(value)}; preset {preset} has {shown(chosen[name])}"

    def later_words(self, *, keep: bool) -> list[str]:
        """The options that give a later command these settings: the working directory and each
        value that its file does not contain, unless ``keep`` saves them."""
        words = _workdir_words(self.workdir, _workdir_of(self.environment))
        before = self._before()
        for name, value in self._explicit().items():
            if (keep and name not in OF_ONE_RUN) or before[name] == value or has_secret(value):
                continue
            words += ["--preset", value] if name == PRESET else ["--set", f"{name}={_text(value)}"]
        return words

    def keep(self, *, replace: bool) -> list[str]:
        """Save the command line's settings in the working directory's file, and return lines that
        list them. An existing file changes only with ``replace``, and keeps everything else."""
        if self.file.exists() and not replace:
            return []
        explicit = self._explicit()
        before = self._before()
        values = {n: value for n, value in explicit.items() if n not in OF_ONE_RUN and not has_secret(value)}
        lines = [f"Kept in {self.file} for later commands: {', '.join(values)}."] if values else []
        lines += [
            f"{name} contains a secret and is not kept in {self.file}: pass it to every command."
            for name, value in explicit.items()
            if has_secret(value)
        ]
        lines += [
            f"{name}={shown(explicit[name])} is for this run alone and is not kept; a later run asks for it again."
            for name in sorted(OF_ONE_RUN & explicit.keys())
            if explicit[name] != before[name]
        ]
        try:
            _write(self.file, values)
        except StoreError as error:
            return [f"WARNING: {error} Later commands need the settings of this one again."]
        return lines

    def _explicit(self) -> dict[str, Any]:
        """The command-line values by name, validated and combined with the remembered ones."""
        command_line = _merged(*(_anchored(tree, Path.cwd()) for tree in (self.config, self.assigned)))
        names = _leaves(self.model, command_line).keys() - {"workdir"}
        values = self._values(self.remembered or {}, command_line)
        return {name: value for name, value in values.items() if name in names}

    def _before(self) -> dict[str, Any]:
        """The values of all settings without the command line."""
        try:
            return self._values(self.remembered or {})
        except SettingsError as error:
            raise SettingsError(f"{self.file}: {error}") from None

    def _explicit_preset(self) -> str | None:
        return self.assigned.get(PRESET, self.config.get(PRESET))

    def _values(self, *trees: Tree) -> dict[str, Any]:
        """The values of all settings, and the preset. All else overrides the environment."""
        trees = (self.environment, *trees)
        values = self._parsed(*trees).model_dump(mode="json")
        return {PRESET: _merged(*trees).get(PRESET, "")} | _leaves(self.model, values)

    def _parsed(self, *trees: Tree) -> Model:
        merged = _merged(*trees)
        preset = merged.pop(PRESET, None)
        tree = {} if preset is None else sources.preset(self.model, str(preset))
        merge(tree, merged)
        return parse(self.model, tree | {"workdir": self.workdir})

    def _fault(self, tree: Tree) -> str:
        """The error message for a single source, or an empty string."""
        try:
            self._parsed(tree)
        except SettingsError as error:
            return str(error)
        return ""


def read_layers(
    model: type[Model], config: Path | None, environment: Mapping[str, str], assigned: Tree, *, remembered: bool = True
) -> Layers[Model]:
    """Read all sources, without the working directory's file unless ``remembered``."""
    file = {} if config is None else sources.toml_file(model, config)
    variables = sources.environment(model, environment)
    workdir = _workdir_of(file, variables, assigned)
    content = read_file(model, workdir) if remembered else None
    return Layers(model, workdir, content, config, file, variables, assigned)


def read_file(model: type[BaseModel], workdir: Path) -> Tree | None:
    """The content of ``WORKDIR/evernear.toml`` with absolute paths, or None without one."""
    path = workdir / FILE
    if not os.path.lexists(path):
        return None
    try:
        tree = sources.toml_file(model, path)
    except SettingsError as error:
        raise SettingsError(f"{error} {_remedy(path)}") from None
    named = tree.pop("workdir", None)
    if named is not None and (workdir / str(named)).resolve() != workdir.resolve():
        raise SettingsError(f"{path}: workdir = {named} is another directory; remove that line.")
    for name, value in tree.items():
        if _is_section(model, name) and not isinstance(value, Mapping):  # another source would replace it silently
            raise SettingsError(f"{path}: {name} = {value} is not a section; write [{name}] and its settings below.")
    return _anchored(tree, workdir.absolute())


def default_workdir() -> Path:
    return _expanded(os.environ.get(f"{sources.ENV_PREFIX}WORKDIR") or str(DEFAULT_WORKDIR))


def command_for(workdir: Path, *words: str) -> str:
    """``evernear WORDS`` with the option for ``workdir``, for messages."""
    return shlex.join(["evernear", *words, *_workdir_words(workdir, default_workdir())])


def has_secret(value: Any) -> bool:
    return mask(_text(value)) != _text(value)


def shown(value: Any) -> str:
    return mask(_text(value)) or "empty"


def _text(value: Any) -> str:
    """Format a value as ``--set`` accepts it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _merged(*trees: Tree) -> Tree:
    merged: Tree = {}
    for tree in trees:
        merge(merged, tree)
    return merged


def _workdir_of(*trees: Tree) -> Path:
    named = str(_merged(*trees).get("workdir", DEFAULT_WORKDIR))
    if not named:  # an unset variable, which would be the current directory
        raise SettingsError(EMPTY_WORKDIR)
    return _expanded(named)


def _expanded(path: str) -> Path:
    """Expand ``~``. If no user has the name that follows it, raise `SettingsError`."""
    try:
        return expanded(Path(path))
    except ValueError as error:
        raise SettingsError(f"{path}: {error}.") from None


def _workdir_words(workdir: Path, bare: Path) -> list[str]:
    """The option for ``workdir``, unless it equals ``bare``, the default."""
    return [] if workdir == bare else ["--workdir", str(workdir)]


def _leaves(model: type[BaseModel], tree: Tree) -> dict[str, Any]:
    """``{"train": {"epochs": 3}}`` to ``{"train.epochs": 3}``, but no setting that is a table."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if _is_section(model, name):
            leaves |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, Mapping) else {}
        else:
            leaves[name] = value
    return leaves


def _remedy(path: Path) -> str:
    """How to repair a settings file that is unreadable or not TOML."""
    if not path.is_file():
        return "Remove it."
    if not os.access(path, os.R_OK):
        return "Make it readable for this user, or choose another --workdir."
    return "Correct it, or delete it to forget its settings."


def _is_section(model: type[BaseModel], name: str) -> bool:
    field = model.model_fields.get(name)
    return field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _anchored(tree: Tree, directory: Path) -> Tree:
    anchored = _merged(tree)
    for name, pattern in (
        (
            "data.source",
            rf"(?P<kind>(?:{'|'.join(PATH_KINDS)}):|(?!\w+:)(?=.+\.(?i:csv|tsv|parquet|pq)))(?P<path>(?!s3://).+)",
        ),
        ("train.weights", r"(?P<kind>)(?P<path>(?!hub$)(?!package:)(?!.*://).+)"),
        ("index.uri", r"(?P<kind>)(?P<path>(?!.*://).+\.db)"),
        ("pipeline.ca_file", r"(?P<kind>)(?P<path>.+)"),
    ):
        section, key = name.split(".")
        values = anchored.get(section)
        text = values.get(key) if isinstance(values, dict) else None
        if isinstance(text, str) and (match := re.fullmatch(pattern, text)):
            anchored[section][key] = match["kind"] + str(directory / _expanded(match["path"]))
    return anchored


def _write(path: Path, values: Mapping[str, Any]) -> None:
    """Set ``values`` in the settings file ``path``, and preserve its other content."""
    import tomlkit  # only runs need it

    header, text = HEADER, ""
    if path.exists():
        with disk_errors(path):
            header, text = "", sources.text_of(path.read_bytes())
    document: Any = tomlkit.parse(text)
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        if section and section not in document:
            document[section] = {}
        table = document[section] if section else document
        if value is None:  # TOML has no null
            table.pop(key, None)
        else:
            table[key] = value
    write_atomically(path.resolve(), header + tomlkit.dumps(document).rstrip("\n") + "\n")  # a link stays a link
