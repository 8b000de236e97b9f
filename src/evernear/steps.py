"""The journey, step by step: what each pipeline step does, as one function of paths and settings.

A component under ``components/`` calls the function of its own name and nothing else, so every step also runs
without KFP. The rooms do the work; here they are only put together. Each function imports what it needs, so that a
step loads no more than that.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from evernear import settings as knobs
from evernear.progress import failures, step

if TYPE_CHECKING:
    from evernear.evaluation.evaluate import Evaluation

Tree = dict[str, Any]
"""A section of the settings as KFP carries it."""


def ingest(store: str, settings: Tree, dataset: str) -> str:
    """Add the source's new images to the dataset; returns the snapshot's digest."""
    with step("ingest") as running:
        from evernear.data.ingest import ingest
        from evernear.data.manifest import SPLITS, save_manifest

        manifest = ingest(knobs.parse(knobs.DataSettings, settings), store, running.say)
        save_manifest(manifest, Path(dataset))
        counts = ", ".join(f"{manifest.count(split):,} {split}" for split in SPLITS)
        height, width, channels = manifest.shape
        running.summary = f"{counts}; {len(manifest.labels)} classes, {height}x{width}x{channels}"
    return manifest.digest


def validate(store: str, settings: Tree, dataset: str, report: str) -> None:
    """Write the report of the data's faults; stop the run at one of severity ``error``."""
    with step("validate") as running:
        from evernear.data.shards import Dataset
        from evernear.data.validate import require_valid, validate
        from evernear.release.registry import Registry
        from evernear.store import open_store, write_atomically

        registry = Registry(open_store(store))
        champion = registry.champion()
        known = registry.show(champion.version).manifest.labels if champion else ()
        found = validate(Dataset.open(Path(dataset)), knobs.parse(knobs.ValidationSettings, settings), known)
        write_atomically(Path(report), found.markdown())
        running.summary = f"{len(found.findings)} findings" if found.findings else "nothing found"
        require_valid(found)


def train(store: str, settings: Tree, dataset: str, trained: str, curves: str) -> None:
    """Train the network; write its weights, and its curves as a page."""
    with step("train") as running:
        from evernear.data.shards import Dataset
        from evernear.embedding.history import Epoch
        from evernear.embedding.train import train
        from evernear.reporting.plots import training_curves
        from evernear.store import open_store, write_atomically

        parsed = knobs.parse(knobs.TrainSettings, settings)

        def say(point: Epoch) -> None:
            accuracy = f"gallery accuracy {point.gallery_accuracy:.2%}"
            running.say(f"epoch {point.epoch}/{parsed.epochs}, loss {point.train_loss:.3f}, {accuracy}")

        data = Dataset.open(Path(dataset))
        result = train(data, parsed, Path(trained), open_store(store), on_epoch=say)
        write_atomically(Path(curves), training_curves(result.epochs))
        kept = result.epochs[result.kept_epoch - 1]
        resumed = f", resumed after epoch {result.resumed_after_epoch}" if result.resumed_after_epoch else ""
        running.summary = f"kept epoch {kept.epoch}, gallery accuracy {kept.gallery_accuracy:.2%}{resumed}"


def export(settings: Tree, dataset: str, trained: str, network: str) -> Tree:
    """Write the network as TorchScript; returns what its artifact's metadata states."""
    with step("export") as running:
        from evernear.data.shards import Dataset
        from evernear.embedding.export import export

        tolerance = knobs.parse(knobs.TrainSettings, settings).parity_tolerance
        result = export(Path(trained), Dataset.open(Path(dataset)), Path(network), tolerance)
        difference = result.parity_max_abs_difference
        running.summary = f"TorchScript within {difference:.1e} of eager on {result.parity_images} images"
    return {"sha256": result.sha256, "parity_max_abs_difference": difference}


def embed(dataset: str, network: str, embeddings: str) -> None:
    """Embed the gallery and the query split."""
    with step("embed") as running:
        from evernear.data.shards import Dataset
        from evernear.embedding.embed import embed

        result = embed(Path(network), Dataset.open(Path(dataset)), Path(embeddings))
        running.summary = f"{sum(shard.count for shard in result.shards):,} embeddings of {result.dim} dimensions"


def index(settings: Tree, dataset: str, embeddings: str, open_set: str, index: str) -> None:
    """Index the gallery, with the open-set threshold that the probe found."""
    with step("index") as running:
        from evernear.data.shards import Dataset
        from evernear.embedding.embed import Embeddings
        from evernear.evaluation.open_set import OpenSet
        from evernear.index.build import build

        labels = Dataset.open(Path(dataset)).labels
        vectors = Embeddings.open(Path(embeddings))
        threshold = OpenSet.model_validate_json(Path(open_set).read_bytes()).threshold
        result = build(vectors, labels, knobs.parse(knobs.IndexSettings, settings), Path(index), threshold=threshold)
        running.summary = f"{result.size:,} vectors, {result.factory}; unknown beyond {result.threshold:.3f}"


def probe(train: Tree, index: Tree, settings: Tree, dataset: str, open_set: str) -> None:
    """Measure on classes that the network never saw how unknown images are told apart."""
    with step("probe") as running:
        from evernear.data.shards import Dataset
        from evernear.evaluation.probe import probe
        from evernear.store import write_atomically

        result = probe(
            Dataset.open(Path(dataset)),
            knobs.parse(knobs.TrainSettings, train),
            knobs.parse(knobs.EvaluationSettings, settings),
            knobs.parse(knobs.IndexSettings, index),
        )
        write_atomically(Path(open_set), result.model_dump_json(indent=2))
        running.summary = f"AUROC {result.auroc} for classes never trained on"


def evaluate(
    store: str, settings: Tree, dataset: str, network: str, index: str, open_set: str, evaluation: str
) -> "Evaluation":
    """Measure candidate and champion, both as served, on the same frozen test split."""
    with step("evaluate") as running:
        from evernear.data.shards import Dataset
        from evernear.evaluation.evaluate import evaluate
        from evernear.evaluation.open_set import OpenSet
        from evernear.evaluation.recogniser import Recogniser
        from evernear.release.champion import open_champion
        from evernear.store import open_store

        parsed = knobs.parse(knobs.EvaluationSettings, settings)
        data, candidate = Dataset.open(Path(dataset)), Recogniser.open(Path(network), Path(index))
        probed = OpenSet.model_validate_json(Path(open_set).read_bytes())
        with open_champion(open_store(store)) as (champion, made_from):
            result = evaluate(candidate, champion, data, probed, parsed, made_from)
        result.save(Path(evaluation))
        running.summary = f"accuracy {result.candidate.accuracy}"
    return result


def gate(run: str, store: str, settings: Tree, evaluation: str, verdict: str, card: str) -> bool:
    """Decide whether the candidate may replace what serves; write the verdict and its card."""
    with step("gate") as running:
        from evernear.evaluation.evaluate import Evaluation
        from evernear.evaluation.gate import decide
        from evernear.reporting.card import verdict_card
        from evernear.reporting.notify import remember
        from evernear.store import open_store, write_atomically

        measured = Evaluation.load(Path(evaluation))
        decided = decide(measured, knobs.parse(knobs.GateSettings, settings))
        write_atomically(Path(verdict), decided.model_dump_json(indent=2))
        write_atomically(Path(card), verdict_card(decided, measured))
        remember(open_store(store), run, verdict=decided.model_dump(mode="json"), metrics=measured.metrics())
        running.summary = ("promote: " if decided.promote else "hold: ") + " ".join(decided.reasons)
    return decided.promote


def archive(settings: Tree, dataset: str, network: str, index: str, evaluation: str, verdict: str, release: str) -> str:
    """Pack the release; returns its version."""
    with step("archive") as running:
        from evernear.data.shards import Dataset
        from evernear.evaluation.evaluate import Evaluation
        from evernear.release.archive import archive

        measured = Evaluation.load(Path(evaluation))
        packed = archive(
            dataset=Dataset.open(Path(dataset)),
            network_dir=Path(network),
            index_dir=Path(index),
            verdict_file=Path(verdict),
            metrics=measured.metrics(),
            parent=measured.champion.name if measured.champion else None,
            settings=knobs.parse(knobs.ServingSettings, settings),
            out_dir=Path(release),
        )
        size_mb = packed.archive.stat().st_size / 1e6
        running.summary = f"release {packed.manifest.version}, {size_mb:.1f} MB"
    return packed.manifest.version


def deploy(run: str, store: str, target: str, workdir: str, settings: Tree, release: str, verdict: str) -> None:
    """Publish the release and bring it up, unless the verdict does not promote it."""
    with step("deploy") as running:
        from evernear.deployment import deploy
        from evernear.reporting.notify import remember
        from evernear.store import open_store

        chosen = {"store": store, "target": target, "workdir": workdir, "serving": settings}
        deployed = deploy(Path(release), Path(verdict), knobs.parse(knobs.Settings, chosen))
        remember(open_store(store), run, deployment=deployed.model_dump(mode="json"))
        running.summary = f"release {deployed.version} serves" + (f" at {deployed.url}" if deployed.url else "")


def notify(run: str, store: str, state: str, error_message: str, outcome: str) -> None:
    """Tell the run's true outcome, to the log, to the store and to ``outcome``."""
    with step("notify") as running:
        from evernear.reporting.notify import tell
        from evernear.store import open_store, write_atomically

        told = tell(open_store(store), run, state, " ".join(failures()) or error_message)
        write_atomically(Path(outcome), told.model_dump_json(indent=2))
        running.summary = told.summary()
