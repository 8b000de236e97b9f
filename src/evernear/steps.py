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

        registry, data = Registry(open_store(store)), Dataset.open(Path(dataset))
        champion = registry.champion()
        known: tuple[str, ...] = ()
        if champion:
            release = registry.show(champion.version).manifest
            known = release.labels
            # The evaluation asks the same, after hours of training.
            data.require_shape(release.preprocessing.shape, champion.version)
        found = validate(data, knobs.parse(knobs.ValidationSettings, settings), known)
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


def reuse(store: str, dataset: str, network: str, open_set: str) -> Tree:
    """Take the champion's network and threshold; returns what the network's artifact states."""
    with step("reuse") as running:
        from evernear.data.shards import Dataset
        from evernear.release.network import take_network
        from evernear.store import open_store, write_atomically

        release, taken = take_network(open_store(store), Dataset.open(Path(dataset)), Path(network))
        write_atomically(Path(open_set), taken.model_dump_json(indent=2))
        running.summary = f"network {release.network_sha256[:12]} of release {release.version}"
    return {"sha256": release.network_sha256, "release": release.version}


def embed(store: str, dataset: str, network: str, embeddings: str) -> Tree:
    """Embed the gallery and the query split; returns how many embeddings were made and how many kept."""
    with step("embed") as running:
        from evernear.data.shards import Dataset
        from evernear.embedding.embed import embed
        from evernear.embedding.export import trained_on
        from evernear.store import open_store

        data, opened = Dataset.open(Path(dataset)), open_store(store)
        seen = trained_on(Path(network), data, opened).manifest.label_counts("train")
        untrained = frozenset(label for label in data.labels if not seen.get(label))
        result = embed(Path(network), data, Path(embeddings), store=opened, untrained=untrained)
        made = result.count - result.reused
        running.summary = f"{made:,} embeddings of {result.dim} dimensions made, {result.reused:,} reused"
    return {"made": made, "reused": result.reused, "untrained_classes": sorted(untrained)}


def index(settings: Tree, dataset: str, embeddings: str, open_set: str, index: str) -> None:
    """Index the gallery, with the open-set threshold that was found with the network."""
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
        strangers = f"AUROC {result.auroc} for classes never trained on"
        running.summary = strangers if result.held_out else "too few classes to leave one out"


def evaluate(
    store: str, settings: Tree, dataset: str, network: str, index: str, open_set: str, evaluation: str
) -> "Evaluation":
    """Measure candidate and champion, both as served, on the same frozen test split."""
    with step("evaluate") as running:
        from evernear.data.shards import Dataset
        from evernear.embedding.export import trained_on
        from evernear.evaluation.evaluate import evaluate
        from evernear.evaluation.open_set import OpenSet
        from evernear.evaluation.recogniser import Recogniser
        from evernear.release.champion import open_champion
        from evernear.store import open_store

        parsed = knobs.parse(knobs.EvaluationSettings, settings)
        data, candidate = Dataset.open(Path(dataset)), Recogniser.open(Path(network), Path(index))
        probed = OpenSet.model_validate_json(Path(open_set).read_bytes())
        opened = open_store(store)
        seen = trained_on(Path(network), data, opened)
        with open_champion(opened) as (champion, made_from):
            result = evaluate(candidate, champion, data, probed, parsed, made_from, seen)
        result.save(Path(evaluation))
        running.summary = f"accuracy {result.candidate.accuracy}"
    return result


def gate(run: str, store: str, settings: Tree, evaluation: str, verdict: str, card: str) -> bool:
    """Decide whether the candidate may replace what serves; write the verdict and its card."""
    with step("gate") as running:
        from evernear.evaluation.evaluate import Evaluation
        from evernear.evaluation.gate import decide
        from evernear.reporting.card import confusion_png, verdict_card
        from evernear.reporting.notify import remember, remember_confusion
        from evernear.store import open_store, write_atomically

        measured = Evaluation.load(Path(evaluation))
        decided = decide(measured, knobs.parse(knobs.GateSettings, settings))
        write_atomically(Path(verdict), decided.model_dump_json(indent=2))
        write_atomically(Path(card), verdict_card(decided, measured))
        kept = open_store(store)
        remember(kept, run, verdict=decided.model_dump(mode="json"), metrics=measured.metrics())
        remember_confusion(kept, run, confusion_png(measured))
        running.summary = ("promote: " if decided.promote else "hold: ") + " ".join(decided.reasons)
    return decided.promote


def archive(
    run: str,
    store: str,
    settings: Tree,
    dataset: str,
    network: str,
    index: str,
    evaluation: str,
    verdict: str,
    release: str,
) -> str:
    """Pack the release; returns its version. One that is held is kept in the registry, for a person to promote."""
    with step("archive") as running:
        from evernear.data.shards import Dataset
        from evernear.evaluation.evaluate import Evaluation
        from evernear.evaluation.verdict import Verdict
        from evernear.release.archive import archive
        from evernear.release.registry import Registry
        from evernear.reporting.notify import remember
        from evernear.store import open_store

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
        kept = open_store(store)
        if not Verdict.load(Path(verdict)).promote:
            Registry(kept).publish(packed.archive)
        remember(kept, run, archived={"version": packed.manifest.version})
        size_mb = packed.archive.stat().st_size / 1e6
        running.summary = f"release {packed.manifest.version}, {size_mb:.1f} MB"
    return packed.manifest.version


def deploy(
    run: str, store: str, target: str, workdir: str, settings: Tree, kubernetes: Tree, release: str, verdict: str
) -> None:
    """Publish the release and bring it up, unless the verdict does not promote it."""
    with step("deploy") as running:
        from evernear.deployment import deploy
        from evernear.reporting.notify import remember
        from evernear.store import open_store

        deployed = deploy(Path(release), Path(verdict), _place(store, target, workdir, settings, kubernetes))
        remember(open_store(store), run, deployment=deployed.model_dump(mode="json"))
        running.summary = f"release {deployed.version} serves" + (f" at {deployed.url}" if deployed.url else "")


def rollback(
    run: str, store: str, target: str, workdir: str, settings: Tree, kubernetes: Tree, release: str, why: str, by: str
) -> None:
    """Let serve again what served before the champion, which has to be ``release`` if that is not empty."""
    with step("rollback") as running:
        from evernear.deployment import rollback
        from evernear.reporting.notify import remember
        from evernear.store import open_store

        place = _place(store, target, workdir, settings, kubernetes)
        restored = rollback(place, why=why, by=by or None, expected=release or None)
        remember(open_store(store), run, rollback=restored.model_dump(mode="json") | {"why": why})
        running.summary = f"release {restored.version} serves again"


def promote(
    run: str, store: str, target: str, workdir: str, settings: Tree, kubernetes: Tree, release: str, why: str, by: str
) -> None:
    """Let a release of the registry serve because a person says so, whatever its verdict says."""
    with step("promote") as running:
        from evernear.deployment import promote
        from evernear.reporting.notify import remember
        from evernear.store import open_store

        place = _place(store, target, workdir, settings, kubernetes)
        promoted = promote(release, place, force=True, why=why, by=by or None)
        remember(open_store(store), run, promotion=promoted.model_dump(mode="json") | {"why": why})
        running.summary = f"release {promoted.version} serves"


def _place(store: str, target: str, workdir: str, settings: Tree, kubernetes: Tree) -> knobs.Settings:
    """Where a release is to serve."""
    chosen = {"store": store, "target": target, "workdir": workdir, "serving": settings, "kubernetes": kubernetes}
    return knobs.parse(knobs.Settings, chosen)


def notify(run: str, store: str, state: str, error_message: str, outcome: str) -> Tree:
    """Tell the run's true outcome, to the log, to the store and to ``outcome``; returns it in short."""
    with step("notify") as running:
        from evernear.reporting.notify import tell
        from evernear.store import open_store, write_atomically

        told = tell(open_store(store), run, state, " ".join(failures()) or error_message)
        write_atomically(Path(outcome), told.model_dump_json(indent=2))
        running.summary = told.summary()
    return {"state": told.state, "release": told.release or "", "told": told.summary()}
