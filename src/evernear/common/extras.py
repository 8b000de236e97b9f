"""Which of evernear's extras a missing library belongs to."""

import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution, requires
from importlib.util import find_spec

from evernear.errors import EvernearError

NEEDED_BY: Mapping[str, tuple[str, ...]] = {
    "evernear.kubeflow.local_run": ("train", "serve", "pipeline"),
    "evernear.kubeflow": ("pipeline",),
    "evernear.deployment.kubernetes": ("pipeline",),
    "evernear.console": ("pipeline",),
    "evernear.review": ("pipeline",),
    "evernear.triggers": ("pipeline",),
    "evernear.serving.http.local": ("model", "prep"),
    "evernear.serving.http": ("prep",),
    "evernear.serving": ("serve",),
    "evernear": ("train",),
}
"""The extras of each package. The first name that a module's name starts with counts."""
DISTRIBUTIONS = {
    "faiss": "faiss-cpu",
    "kfp.kubernetes": "kfp-kubernetes",
    "kfp_server_api": "kfp",
    "mlflow": "mlflow-skinny",
    "model_archiver": "torch-model-archiver",
    "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "sklearn": "scikit-learn",
    "slack_sdk": "slack-bolt",
    "ts": "torchserve",
    "yaml": "pyyaml",
}
"""The distributions of modules that have another name."""


def not_installed(name: str, requirement: str) -> str:
    return f"{name} is not installed; run `pip install '{requirement}'`."


def missing_library(error: ModuleNotFoundError) -> EvernearError | None:
    """The error that names the extras with the library whose import raised ``error``. None for a
    missing module of evernear, which is a bug."""
    name = error.name or ""
    if name.partition(".")[0] in ("", "evernear", "pipelines", "components"):
        return None
    extras = _extras(name, [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)])
    return EvernearError(not_installed(name, f"evernear[{','.join(extras)}]" if extras else name))


def require_libraries(*names: str) -> None:
    """Raise the error of an import for a library that is not installed, without importing any."""
    for name in names:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _extras(name: str, modules: Sequence[str]) -> tuple[str, ...]:
    """The extras to install for ``name``. Each of ``modules`` imports the next, and the last one
    ``name``."""
    containing = {extra for extra, names in _requirements().items() if _distribution(name) in names}
    needed = (_needed_by(module) for module in modules if module.startswith("evernear.") and ".cli." not in module)
    for extras in needed:
        if containing & set(extras):
            return tuple(extra for extra in extras if extra in containing or not _is_installed(extra))
    return tuple(sorted(containing))[:1]


def _needed_by(module: str) -> tuple[str, ...]:
    return next(extras for package, extras in NEEDED_BY.items() if f"{module}.".startswith(f"{package}."))


def _distribution(name: str) -> str:
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((DISTRIBUTIONS[prefix] for prefix in prefixes if prefix in DISTRIBUTIONS), parts[0].replace("_", "-"))


def _is_installed(extra: str) -> bool:
    try:
        return all(distribution(name) for name in _requirements()[extra])
    except PackageNotFoundError:
        return False


def _requirements() -> dict[str, set[str]]:
    """The distributions of each extra."""
    found: dict[str, set[str]] = {}
    for name, extra in _of_extras():
        found.setdefault(extra, set()).add(name)
    return found


def _of_extras() -> Iterator[tuple[str, str]]:
    for requirement in requires("evernear") or ():
        name, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if name and extra:
            yield name[0].lower().replace("_", "-"), extra[1]
