"""Optional integrations: the features that each may offer, and how the core calls them.

A `Plugin` is the ``PLUGIN`` of ``evernear/integrations/NAME/plugin.py``, or of an external package
that names it as an entry point in the group `GROUP`. Every command imports that module, so it
imports its dependencies inside functions. The core never imports an integration by name.
"""

import logging
import pkgutil
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

from evernear.common.masking import mask
from evernear.common.output import printable
from evernear.errors import EvernearError, SettingsError

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from evernear.common.run_record import RunRecord
    from evernear.embedding.embeddings import EmbeddingBlock
    from evernear.index.choose import Choice
    from evernear.index.description import Collection
    from evernear.index.exact import ExactNeighbors
    from evernear.index.vectors import GalleryVectors, VectorIndex
    from evernear.release.promotions import Champion
    from evernear.release.registry import Registry
    from evernear.settings import IndexSettings

GROUP = "evernear.plugins"
PACKAGE = "evernear.integrations"
FAISS = "faiss"
"""The backend whose vectors are in the release's archive. It is not a plugin."""
REASON_MAX_CHARACTERS = 300
_log = logging.getLogger(__name__)


class IndexBackend(Protocol):
    """Stores the vectors of a gallery outside the release's archive."""

    def check(self, settings: "IndexSettings") -> None:
        """Check, before a run starts, that its gallery can be written."""
        ...

    def create(
        self, gallery: "GalleryVectors", settings: "IndexSettings", queries: "EmbeddingBlock", exact: "ExactNeighbors"
    ) -> "Choice":
        """Fill a collection. If ``settings.type`` is ``auto``, choose its type on ``queries``."""
        ...

    def open(self, collection: "Collection", shape: tuple[int, int], search: str) -> "VectorIndex":
        """Open a collection of ``shape`` (vectors, dimensions) with the parameters ``search``."""
        ...

    def drop(self, collection: "Collection") -> None:
        """Delete a collection if it exists."""
        ...


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
    backends: Mapping[str, Callable[[], IndexBackend]] = field(default_factory=dict)
    """Keyed by the value of ``index.backend``."""
    champion_moved: "Callable[[Registry, Champion | None], list[str]] | None" = None
    """Called with the previous champion after each move, perhaps repeatedly. Returns warnings."""
    run_ended: "Callable[[RunRecord, str], list[str]] | None" = None
    """Called, perhaps repeatedly, with an ended run's record and HTML page. Returns warnings."""
    commands: Callable[[], list[Command]] | None = None
    tracer_provider: "Callable[[str], TracerProvider | None] | None" = None
    """The provider for the named server, or None if the environment does not configure it."""

    @contextmanager
    def installed(self) -> Generator[None]:
        """Convert a missing library to a `SettingsError` that names the package to install."""
        try:
            yield
        except ModuleNotFoundError as error:
            if (error.name or "evernear").partition(".")[0] == "evernear":  # a mistake in the code
                raise
            raise SettingsError(f"{error.name} is not installed; install {self.install}.") from None


@cache
def plugins() -> tuple[Plugin, ...]:
    """evernear's own in alphabetical order, then those of external packages."""
    own = import_module(PACKAGE)
    names = sorted(module.name for module in pkgutil.iter_modules(own.__path__))
    return (*(import_module(f"{PACKAGE}.{name}.plugin").PLUGIN for name in names), *_of_other_packages())


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


@contextmanager
def index_backend(name: str) -> Generator[IndexBackend]:
    """The backend that ``index.backend`` or a release names. Reports a missing library."""
    for plugin in plugins():
        if make := plugin.backends.get(name):
            with plugin.installed():
                yield make()
            return
    raise SettingsError(f"The index backend {name} is unknown here; known: {', '.join(backend_names())}.")


def champion_moved(registry: "Registry", before: "Champion | None") -> None:
    """Notify the integrations that the champion differs from ``before``. The release is already
    live and does not depend on them, so a failure is a warning."""
    for plugin in plugins():
        if plugin.champion_moved:
            for warning in _warnings(plugin, plugin.champion_moved, registry, before):
                _log.warning("%s", warning)


def run_ended(record: "RunRecord", page: str) -> list[str]:
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


def tracer_provider(service: str) -> "TracerProvider | None":
    for plugin in plugins():
        if plugin.tracer_provider:
            try:
                with plugin.installed():
                    provider = plugin.tracer_provider(service)
            except EvernearError as error:
                _log.warning("Traces are not exported: %s", error)
                continue
            if provider is not None:
                return provider
    return None


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
