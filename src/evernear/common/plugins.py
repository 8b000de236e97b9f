"""Optional integrations: the features that each may offer, and how the core calls them.

A `Plugin` is the ``PLUGIN`` of a module in `evernear.integrations`, or of an external package that
names it as an entry point in the group `GROUP`. Every command imports that module, so it imports
its dependencies inside functions. The core never imports an integration by name.
"""

import logging
import pkgutil
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from evernear.common.extras import not_installed
from evernear.common.masking import mask
from evernear.common.output import printable
from evernear.common.run_record import RunRecord
from evernear.common.store import Store
from evernear.errors import EvernearError, SettingsError

GROUP = "evernear.plugins"
PACKAGE = "evernear.integrations"
FAISS = "faiss"
"""The backend whose vectors are in the release's archive. It is not a plugin."""
REASON_MAX_CHARACTERS = 300
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Command:
    name: str
    run: Callable[..., None]
    panel: str = "Others"
    """The command's heading in ``evernear --help``. If empty, it is hidden."""


@dataclass(frozen=True)
class Plugin:
    """The features of an integration. All but ``install`` are optional."""

    install: str
    """The requirement that includes its libraries, such as ``evernear[milvus]``."""
    backends: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Make an `evernear.index.vectors.IndexBackend`. Keyed by the value of ``index.backend``."""
    champion_moved: Callable[[Store, str | None], list[str]] | None = None
    """Called after each move of the champion, perhaps repeatedly, with the registry's store and the
    previous champion's version. Returns warnings."""
    run_ended: Callable[[RunRecord, str], list[str]] | None = None
    """Called, perhaps repeatedly, with an ended run's record and HTML page. Returns warnings."""
    commands: Callable[[], list[Command]] | None = None
    tracer_provider: Callable[[str], Any] | None = None
    """Makes the `opentelemetry.trace.TracerProvider` for the named server, or returns None if the
    environment does not configure it."""

    @contextmanager
    def installed(self) -> Generator[None]:
        """Convert a missing library to a `SettingsError` that names the package to install."""
        try:
            yield
        except ModuleNotFoundError as error:
            if (error.name or "evernear").partition(".")[0] == "evernear":  # a mistake in the code
                raise
            raise SettingsError(not_installed(str(error.name), self.install)) from None


@cache
def plugins() -> tuple[Plugin, ...]:
    """evernear's own in alphabetical order, then those of external packages."""
    own = import_module(PACKAGE)
    names = sorted(module.name for module in pkgutil.iter_modules(own.__path__))
    return (*(import_module(f"{PACKAGE}.{name}").PLUGIN for name in names), *_of_other_packages())


def _of_other_packages() -> Iterator[Plugin]:
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            plugin = entry.load()
        except Exception as error:  # an external module may raise any error
            plugin = error
        if isinstance(plugin, Plugin):
            yield plugin
            continue
        fault = sentence(plugin) if isinstance(plugin, Exception) else "it is no evernear.common.plugins.Plugin."
        _log.warning("The plug-in %s (%s) is left out: %s", entry.name, entry.value, fault)


def backend_names() -> tuple[str, ...]:
    return (FAISS, *(name for plugin in plugins() for name in plugin.backends))


def champion_moved(store: Store, before: str | None) -> None:
    """Notify the integrations that the champion differs from ``before``. The release is already
    live and does not depend on them, so a failure is a warning."""
    for plugin in plugins():
        if plugin.champion_moved:
            for warning in _warnings(plugin, plugin.champion_moved, store, before):
                _log.warning("%s", warning)


def run_ended(record: RunRecord, page: str) -> list[str]:
    """Notify the integrations that a run has ended, and return their warnings. The record in the
    store is authoritative, so a failure never fails the run."""
    return [
        warning
        for plugin in plugins()
        if plugin.run_ended
        for warning in _warnings(plugin, plugin.run_ended, record, page)
    ]


def commands() -> Iterator[Command]:
    for plugin in plugins():
        for command in plugin.commands() if plugin.commands else ():
            yield Command(command.name, plugin.installed()(command.run), command.panel)


def tracer_providers(service: str) -> Iterator[Any]:
    for plugin in plugins():
        if plugin.tracer_provider:
            try:
                with plugin.installed():
                    yield plugin.tracer_provider(service)
            except EvernearError as error:
                _log.warning("Traces are not exported: %s", error)


def rejection(system: str, variable: str, error: BaseException, item: str) -> str:
    """A warning that the system at ``variable`` rejected ``item`` or is unreachable."""
    return f"{system} of {variable} rejected the {item}: {sentence(error)}"


def sentence(error: BaseException) -> str:
    """The reason on one line, without passwords."""
    while error.__context__:  # the first error is the most specific: connection refused, name not known, timed out
        error = error.__context__
    reason = mask(printable(" ".join(str(error).split())) or type(error).__name__)
    return f"{reason[:REASON_MAX_CHARACTERS].rstrip('.')}."


def _warnings(plugin: Plugin, offer: Callable[..., list[str]], *arguments: Any) -> list[str]:
    try:
        with plugin.installed():
            return offer(*arguments)
    except EvernearError as error:
        return [str(error)]
    except Exception as error:
        return [f"The plug-in of {plugin.install} failed: {sentence(error)}"]
