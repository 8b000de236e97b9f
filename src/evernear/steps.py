"""The pipeline's steps, one function each: open the artifacts of the steps before, call one room, write its artifact.

A component under ``components/`` calls the function with its own name and nothing else, so every step also runs
without KFP. The rooms do the work. Each function imports what it needs, so that a step loads no more than that.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evernear.disk import write_atomically
from evernear.progress import Step, step
from evernear.run_record import RunRecord
from evernear.settings import RunSettings, of_run, parse
from evernear.store import open_store

if TYPE_CHECKING:
    from evernear.evaluation.evaluate import Evaluation

Tree = dict[str, Any]
"""The settings of a run (`evernear.settings.RunSettings`) as JSON: `ingest` returns them, all others take them."""
UNNAMED = "the Kubeflow Pipelines UI or API"
"""What started a run that does not say so itself."""


def ingest(run: str, store: str, parameters: dict[str, str], settings: Tree, dataset: str) -> tuple[str, Tree]:
    """Add the source's new images to the dataset; returns the snapshot's digest and the settings of the run.

    The first step also resolves the run's ``parameters`` (`evernear.settings.of_run`) and rejects a run that cannot
    deploy.
    """
    with step("ingest", run, store) as running:
        from evernear.data.ingest import ingest
        from evernear.data.manifest import SPLITS, save_manifest
        from evernear.deployment import require_deployable

        chosen = of_run(settings, **parameters, store=store)
        require_deployable(chosen)
        manifest = ingest(chosen.data, chosen.store_uri, running.say)
        save_manifest(manifest, Path(dataset))
        counts = ", ".join(f"{manifest.count(split):,} {split}" for split in SPLITS)
        height, width, channels = manifest.shape
        running.summary = f"{counts}; {len(manifest.labels)} classes, {height}x{width}x{channels}"
    return manifest.digest, chosen.model_dump(mode="json")


def validate(run: str, settings: Tree, dataset: str, report: str) -> None:
    """Write the report of the data's faults; stop the run at one of severity ``error``."""
    with _step("validate", run, settings) as (running, chosen):
        from evernear.data.shards import Dataset
        from evernear.data.validate import require_valid, validate
        from evernear.release.registry import Registry

        registry, data = Registry(open_store(chosen.store_uri)), Dataset.open(Path(dataset))
        champion = registry.champion()
        known: tuple[str, ...] = ()
        if champion:
            release = registry.get(champion.version).manifest
            known = release.labels
            # The evaluation asks the same, after hours of training.
            data.require_shape(release.preprocessing.shape, champion.version)
        found = validate(data, chosen.validation, known)
        write_atomically(Path(report), found.markdown())
        running.summary = f"{len(found.findings)} findings" if found.findings else "nothing found"
        require_valid(found)


def train(run: str, settings: Tree, dataset: str, trained: str, curves: str) -> None:
    """Train the network; write its weights, and its curves as a page."""
    with _step("train", run, settings) as (running, chosen):
        from evernear.data.shards import Dataset
        from evernear.embedding.artifact import Epoch
        from evernear.embedding.train import train
        from evernear.reporting.plots import training_curves

        def say(point: Epoch) -> None:
            accuracy = f"gallery accuracy {point.gallery_accuracy:.2%}"
            running.say(f"epoch {point.epoch}/{chosen.train.epochs}, loss {point.train_loss:.3f}, {accuracy}")

        data = Dataset.open(Path(dataset))
        result = train(data, chosen.train, Path(trained), open_store(chosen.store_uri), on_epoch=say)
        write_atomically(Path(curves), training_curves(result.epochs))
        kept = result.epochs[result.best_epoch - 1]
        resumed = f", resumed after epoch {result.resumed_after_epoch}" if result.resumed_after_epoch else ""
        running.summary = f"kept epoch {kept.epoch}, gallery accuracy {kept.gallery_accuracy:.2%}{resumed}"


def export(run: str, settings: Tree, dataset: str, trained: str, network: str) -> Tree:
    """Write the network as TorchScript; returns what its artifact's metadata states."""
    with _step("export", run, settings) as (running, chosen):
        from evernear.data.shards import Dataset
        from evernear.embedding.export import export

        tolerance = chosen.train.parity_tolerance
        result = export(Path(trained), Dataset.open(Path(dataset)), Path(network), tolerance)
        difference = result.parity_max_abs_difference
        running.summary = f"TorchScript within {difference:.1e} of eager on {result.parity_images} images"
    return {"sha256": result.sha256, "parity_max_abs_difference": difference}


def reuse(run: str, settings: Tree, dataset: str, network: str, open_set: str) -> Tree:
    """Take the champion's network and threshold; returns what the network's artifact states."""
    with _step("reuse", run, settings) as (running, chosen):
        from evernear.data.shards import Dataset
        from evernear.release.reuse import reuse_network

        store = open_store(chosen.store_uri)
        release, taken = reuse_network(store, Dataset.open(Path(dataset)), Path(network))
        write_atomically(Path(open_set), taken.model_dump_json(indent=2))
        running.summary = f"network {release.network_sha256[:12]} of release {release.version}"
    return {"sha256": release.network_sha256, "release": release.version}


def embed(run: str, settings: Tree, dataset: str, network: str, embeddings: str) -> Tree:
    """Embed the gallery and the query split; returns how many embeddings were made and how many kept."""
    with _step("embed", run, settings) as (running, chosen):
        from evernear.data.shards import Dataset
        from evernear.embedding.embed import embed
        from evernear.embedding.export import training_dataset

        data, opened = Dataset.open(Path(dataset)), open_store(chosen.store_uri)
        seen = training_dataset(Path(network), data, opened).manifest.label_counts("train")
        untrained = frozenset(label for label in data.labels if not seen.get(label))
        result = embed(Path(network), data, Path(embeddings), store=opened, untrained=untrained)
        made = result.count - result.reused
        running.summary = f"{made:,} embeddings of {result.dim} dimensions made, {result.reused:,} reused"
    return {"made": made, "reused": result.reused, "untrained_classes": sorted(untrained)}


def index(run: str, settings: Tree, dataset: str, embeddings: str, open_set: str, index: str) -> None:
    """Index the gallery, with the open-set threshold that was found with the network."""
    with _step("index", run, settings) as (running, chosen):
        from evernear.data.shards import Dataset
        from evernear.embedding.embed import Embeddings
        from evernear.evaluation.open_set import OpenSet
        from evernear.index.build import build

        labels = Dataset.open(Path(dataset)).labels
        vectors = Embeddings.open(Path(embeddings))
        threshold = OpenSet.model_validate_json(Path(open_set).read_bytes()).threshold
        result = build(vectors, labels, chosen.index, Path(index), threshold=threshold)
        running.summary = f"{result.size:,} vectors, {result.factory}; unknown beyond {result.threshold:.3f}"


def probe(run: str, settings: Tree, dataset: str, open_set: str) -> None:
    """Measure on classes that the network never saw how unknown images are told apart."""
    with _step("probe", run, settings) as (running, chosen):
        from evernear.data.shards import Dataset
        from evernear.evaluation.probe import probe

        result = probe(Dataset.open(Path(dataset)), chosen.train, chosen.evaluation, chosen.index)
        write_atomically(Path(open_set), result.model_dump_json(indent=2))
        strangers = f"AUROC {result.auroc} for classes never trained on"
        running.summary = strangers if result.held_out else "too few classes to leave one out"


def evaluate(
    run: str, settings: Tree, dataset: str, network: str, index: str, open_set: str, evaluation: str
) -> "Evaluation":
    """Measure candidate and champion, both as served, on the same frozen test split."""
    with _step("evaluate", run, settings) as (running, chosen):
        from evernear.data.shards import Dataset
        from evernear.embedding.export import training_dataset
        from evernear.evaluation.evaluate import evaluate
        from evernear.evaluation.open_set import OpenSet
        from evernear.evaluation.recognizer import Recognizer
        from evernear.release.champion import open_champion

        data, candidate = Dataset.open(Path(dataset)), Recognizer.open(Path(network), Path(index))
        probed = OpenSet.model_validate_json(Path(open_set).read_bytes())
        opened = open_store(chosen.store_uri)
        seen = training_dataset(Path(network), data, opened)
        with open_champion(opened) as (champion, made_from):
            result = evaluate(candidate, champion, data, probed, chosen.evaluation, made_from, seen)
        result.write(Path(evaluation))
        running.summary = f"accuracy {result.candidate.accuracy}"
    return result


def gate(run: str, settings: Tree, evaluation: str, verdict: str, card: str) -> bool:
    """Decide whether the candidate may replace what serves; write the verdict and its card."""
    with _step("gate", run, settings) as (running, chosen):
        from evernear.evaluation.evaluate import Evaluation
        from evernear.evaluation.gate import decide
        from evernear.reporting.card import confusion_png, verdict_card
        from evernear.reporting.notify import save_confusion_matrix

        measured = Evaluation.open(Path(evaluation))
        decided = decide(measured, chosen.gate)
        write_atomically(Path(verdict), decided.model_dump_json(indent=2))
        write_atomically(Path(card), verdict_card(decided, measured))
        record = RunRecord(open_store(chosen.store_uri), run)
        record.save(verdict=decided.model_dump(mode="json"), metrics=measured.metrics())
        save_confusion_matrix(record, confusion_png(measured))
        running.summary = ("promote: " if decided.promote else "hold: ") + " ".join(decided.reasons)
    return decided.promote


def archive(run: str, settings: Tree, dataset: str, parts: dict[str, str], release: str) -> str:
    """Pack the release; returns its version. A held release is published, too, for a person to promote.

    ``parts`` has the directories ``network``, ``index`` and ``evaluation`` and the file ``verdict``.
    """
    with _step("archive", run, settings) as (running, chosen):
        from evernear.data.shards import Dataset
        from evernear.evaluation.evaluate import Evaluation
        from evernear.evaluation.verdict import Verdict
        from evernear.release.archive import Candidate, archive
        from evernear.release.registry import Registry
        from evernear.serving import HANDLER

        measured = Evaluation.open(Path(parts["evaluation"]))
        candidate = Candidate(
            dataset=Dataset.open(Path(dataset)),
            network_dir=Path(parts["network"]),
            index_dir=Path(parts["index"]),
            verdict_file=Path(parts["verdict"]),
            metrics=measured.metrics(),
            parent=measured.champion.name if measured.champion else None,
        )
        packed = archive(candidate, chosen.serving, HANDLER, Path(release))
        store = open_store(chosen.store_uri)
        if not Verdict.load(Path(parts["verdict"])).promote:
            Registry(store).publish(packed.archive)
        RunRecord(store, run).save(archived={"version": packed.manifest.version})
        size_mb = packed.archive.stat().st_size / 1e6
        running.summary = f"release {packed.manifest.version}, {size_mb:.1f} MB"
    return packed.manifest.version


def deploy(run: str, settings: Tree, started_by: str, release: str, verdict: str) -> None:
    """Publish the release and bring it up, unless the verdict does not promote it."""
    with _step("deploy", run, settings) as (running, chosen):
        from evernear.deployment import deploy
        from evernear.release.archive_reader import ARCHIVE_FILE
        from evernear.release.registry import Cause

        deployed = deploy(Path(release) / ARCHIVE_FILE, Path(verdict), chosen, Cause(by=started_by or UNNAMED, run=run))
        RunRecord(open_store(chosen.store_uri), run).save(deployment=deployed.model_dump(mode="json"))
        running.summary = f"release {deployed.version} is live" + (f" at {deployed.url}" if deployed.url else "")


def rollback(
    run: str, store: str, parameters: dict[str, str], settings: Tree, release: str, reason: str, started_by: str
) -> None:
    """Make the previous champion live again. Fail if ``release`` is set and is not the current champion."""
    with step("rollback", run, store) as running:
        from evernear.deployment import roll_back
        from evernear.release.registry import Cause

        chosen = of_run(settings, **parameters, store=store)
        cause = Cause(by=started_by or UNNAMED, why=reason, run=run)
        restored = roll_back(chosen, cause=cause, expected=release or None)
        RunRecord(open_store(store), run).save(rollback=restored.model_dump(mode="json") | {"why": reason})
        running.summary = f"release {restored.version} is live again"


def promote(
    run: str, store: str, parameters: dict[str, str], settings: Tree, release: str, reason: str, started_by: str
) -> None:
    """Make a release of the registry live because a person decided so, whatever its verdict."""
    with step("promote", run, store) as running:
        from evernear.deployment import promote
        from evernear.release.registry import Cause

        chosen = of_run(settings, **parameters, store=store)
        cause = Cause(by=started_by or UNNAMED, why=reason, run=run)
        promoted = promote(release, chosen, force=True, cause=cause)
        RunRecord(open_store(store), run).save(promotion=promoted.model_dump(mode="json") | {"why": reason})
        running.summary = f"release {promoted.version} is live"


def notify(run: str, store: str, pipeline: str, state: str, error_message: str, outcome: str, page: str) -> Tree:
    """Write the outcome of the run, as JSON and as a page, and record it; returns it in short."""
    with step("notify", run, store) as running:
        from evernear.reporting.notify import finalize

        found = finalize(RunRecord(open_store(store), run), pipeline, state, error_message)
        write_atomically(Path(outcome), found.model_dump_json(indent=2))
        write_atomically(Path(page), found.markdown())
        running.summary = found.summary()
    return {"state": found.state, "release": found.release or "", "summary": found.summary()}


@contextmanager
def _step(name: str, run: str, settings: Tree) -> Generator[tuple[Step, RunSettings]]:
    """A step after `ingest`, with the settings that `ingest` resolved."""
    chosen = parse(RunSettings, settings)
    with step(name, run, chosen.store_uri) as running:
        yield running, chosen
