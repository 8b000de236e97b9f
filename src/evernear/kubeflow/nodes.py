"""Choose where the parts of a step run: in the step's process, or on several nodes (`data.nodes`,
`index.nodes`).

The Kubernetes client is imported only if a step uses other nodes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from evernear.common.parts import OpenWorker, Parts, PartsRecord, run_parts
from evernear.common.plugins import FAISS
from evernear.common.progress import Countdown
from evernear.common.store import open_store
from evernear.common.store.base import put_folder
from evernear.errors import SettingsError
from evernear.settings import RunSettings
from evernear.settings.train import PACKAGE_PREFIX

NO_INPUTS: Mapping[str, Path] = {}


@dataclass
class StepNodes:
    """Runs the parts of one step according to its settings."""

    nodes: int
    report: Callable[[str], None]
    ran: PartsRecord | None = None
    """How pods ran the last plan, or None if no pods ran parts. An ingest that continues after a
    kill has several plans."""

    @property
    def is_one(self) -> bool:
        """Whether the step's process runs all parts."""
        return self.nodes == 1

    def summary(self) -> str:
        """The end of a sentence, or an empty string if no pods ran parts."""
        return self.ran.summary() if self.ran else ""

    def run(self, parts: Parts, open_here: OpenWorker, inputs: Mapping[str, Path] = NO_INPUTS) -> None:
        """Run all parts in ``parts`` that have no result. ``open_here`` opens the worker of this
        process. Each directory of ``inputs`` is copied to the folder of the store that is its key,
        if workers run on other machines. If pods ran parts, `ran` is set."""
        if self.is_one:
            run_parts(parts, open_here)
            return
        from evernear.kubeflow.indexed_job import run_on_nodes

        for folder, directory in inputs.items():
            put_folder(parts.store, folder, directory)
        countdown = Countdown(self.report)

        def on_parts(done: int, total: int) -> None:
            countdown(done, total, f"{done:,} of {total:,} parts")

        self.ran = run_on_nodes(parts, self.nodes, self.report, on_parts) or self.ran


def require_reachable(nodes: int, what: str, *uris: str) -> None:
    """Check that the nodes of a step can reach ``what`` at ``uris``."""
    if nodes < 1:
        raise SettingsError(f"nodes is {nodes}; set a number above 0.")
    if nodes > 1:
        from evernear.kubeflow.indexed_job import require_shared

        for uri in uris:
            require_shared(uri, what)


def require_locations(chosen: RunSettings) -> None:
    """Check that all nodes of a run's steps can reach what they read."""
    require_reachable(chosen.data.nodes, "the source", chosen.data.location())
    require_reachable(max(chosen.data.nodes, chosen.index.nodes), "the store", chosen.store_uri)


def require_nodes(chosen: RunSettings) -> None:
    """Check, at the start of a run, that its steps can use the requested nodes."""
    require_locations(chosen)
    if (chosen.data.nodes, chosen.index.nodes) != (1, 1):
        from evernear.kubeflow.job import image_of_nodes

        image_of_nodes()


def require_runnable(chosen: RunSettings) -> None:
    """Check at the start of a run the services that its later steps need, which can save hours of
    training: the source, the deployment target, the nodes, the index backend and the weights."""
    from evernear.data.sources import open_source  # only the first step needs both
    from evernear.deployment import open_target

    open_source(chosen.data.source)  # a mistyped directory is reported before a busy port
    open_target(chosen).require_deployable()
    require_nodes(chosen)
    if chosen.index.backend != FAISS:
        from evernear.index.vectors import index_backend

        with index_backend(chosen.index.backend) as backend:
            backend.check(chosen.index)
    if chosen.train.weights.startswith(PACKAGE_PREFIX):
        from evernear.embedding.packaged_weights import store_package

        store_package(chosen.train.weights, open_store(chosen.store_uri))
