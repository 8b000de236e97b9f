"""The pipeline's steps, one function each.

A step opens the input artifacts, calls one package and writes the output artifact. A component
under ``components/`` only calls the function of its name, so steps also run without KFP. Imports
are local so that a step loads only its own libraries.
"""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from evernear.common.disk import sha256_file, write_atomically
from evernear.common.output import printable, warned
from evernear.common.plugins import FAISS, run_ended
from evernear.common.progress import Step, step
from evernear.common.run_record import LEFT_OUT_FILE, RunRecord
from evernear.common.step_results import Computed, compute_once, result_key
from evernear.common.store import Store, open_store
from evernear.common.store.current import current_store
from evernear.embedding import CODE, DESCRIPTION_FILE
from evernear.embedding.clock import Clock
from evernear.kubeflow.parameters import resolve, with_uploaded
from evernear.reporting import countdowns
from evernear.settings import PRETRAINED_SIZE_PX, OneRun, RunSettings, TrainSettings, parse
from evernear.settings.train import ARCFACE, WEIGHTS_OF_PHOTOGRAPHS, TrainingChoices

if TYPE_CHECKING:
    from evernear.data.shards import Dataset
    from evernear.embedding.features import FrozenFeatures
    from evernear.evaluation.evaluate import Evaluation

Tree = dict[str, Any]
"""A run's settings (`evernear.settings.OneRun`) as JSON without defaults."""
LIBRARIES = ("faiss-cpu", "numpy", "openvino", "scipy", "timm", "torch")
"""Libraries whose versions affect the results of training, export and probe."""
PROBE_CODE = ("data", "embedding", "index", "evaluation")
"""The folders whose code determines the result of the probe."""


def ingest(run: str, store: str, parameters: dict[str, str], settings: Tree, dataset: str) -> tuple[str, Tree]:
    """Add the source's new images to the dataset. Return the snapshot's digest and the run's
    settings. This first step also resolves them and rejects a run that cannot deploy."""
    given = with_uploaded(parameters | {"settings": settings, "store": store})
    with step("ingest", run, given["store"]) as running:
        from evernear.data.ingest import ingest_source
        from evernear.data.list import ClassMinimum
        from evernear.data.manifest import save_manifest
        from evernear.embedding.packaged_weights import is_installed
        from evernear.kubeflow.nodes import StepNodes, require_runnable
        from evernear.release.champion import live_classes
        from evernear.review.renames import with_renames

        chosen = resolve({"source": ""} | given)
        require_runnable(chosen)
        stored = current_store(chosen.store_uri)
        classes = chosen.classes
        chosen = chosen.model_copy(update={"classes": with_renames(classes, stored)})
        nodes = StepNodes(chosen.data.nodes, running.report)
        live = live_classes(stored, chosen.classes)
        minimum = ClassMinimum(chosen.validation.min_class_images, live)
        train = chosen.train
        is_default = train == TrainSettings(minutes=train.minutes, seed=train.seed)
        starts_pretrained = is_default and is_installed(WEIGHTS_OF_PHOTOGRAPHS)
        left_out = Path(dataset).with_name(LEFT_OUT_FILE)
        left_out.parent.mkdir(parents=True, exist_ok=True)
        warnings: list[str] = []
        manifest = ingest_source(
            chosen.data,
            chosen.store_uri,
            report=running.report,
            warn=warnings.append,
            run=nodes.run,
            minimum=minimum,
            max_size_px=chosen.max_size_px,
            photo_size_px=PRETRAINED_SIZE_PX if starts_pretrained else chosen.max_size_px,
            reread=chosen.reread,
            moved_from=chosen.moved_from,
            left_out=left_out,
        )
        chosen = chosen.model_copy(update={"classes": with_renames(classes, stored, list(manifest.images_by_class()))})
        if starts_pretrained and manifest.has_photographs:
            train = train.model_copy(update={"weights": WEIGHTS_OF_PHOTOGRAPHS})
            chosen = chosen.model_copy(update={"train": train})
            running.note(
                f"Photographs start from pretrained weights (train.weights={WEIGHTS_OF_PHOTOGRAPHS}), because they are "
                "installed; --set train.backbone=compact starts from random ones."
            )
        save_manifest(manifest, Path(dataset))
        record = RunRecord(stored, run)
        record.save(settings=chosen.model_dump(mode="json"), parts_ingest=nodes.ran)
        if left_out.stat().st_size:
            record.put(LEFT_OUT_FILE, left_out)
        running.summary = manifest.summary() + nodes.summary() + warned(warnings)
    # Argo copies the settings several times per step. With defaults, it would compress the workflow
    # status, which KFP's API server cannot read, so the last steps would not be reported.
    return manifest.digest, chosen.model_dump(mode="json", exclude_defaults=True)


def validate(run: str, settings: Tree, dataset: str, report: str) -> None:
    """Report problems with the dataset. One of severity ``error`` stops the run."""
    with _step("validate", run, settings) as (running, chosen, record):
        from evernear.data.near_duplicates import find_near_duplicates
        from evernear.data.shards import Dataset
        from evernear.data.validate import require_valid, validate_dataset
        from evernear.evaluation.baselines import find_few_groups
        from evernear.release.champion import champion_labels

        data = Dataset.open(Path(dataset))
        known = champion_labels(record.store, data)
        running.report("comparing the test images with train and gallery")
        near_duplicates, pairs = find_near_duplicates(data, chosen.data.group)
        few = None if known else find_few_groups(data, chosen)
        result = validate_dataset(
            data,
            chosen.validation,
            known,
            chosen.classes,
            near_duplicates,
            from_scratch=not chosen.train.weights,
            few_groups=f"The gate will hold a first release. {few.sentence()}" if few else "",
        )
        write_atomically(Path(report), result.markdown())
        record.save(validation=result, near_duplicates=pairs)
        for note in result.notes():
            running.note(note)
        running.summary = result.summary()
        require_valid(result)


def train(run: str, settings: Tree, dataset: str, trained: str, curves: str) -> None:
    clock = Clock()
    with _step("train", run, settings) as (running, chosen, record):
        from evernear.data.shards import Dataset
        from evernear.reporting.page import page
        from evernear.reporting.plots import training_curves

        data = Dataset.open(Path(dataset))
        train_here = partial(_train, running, record, data, chosen, Path(trained), clock)
        if chosen.train.keeps_backbone:
            index = chosen.model_dump(mode="json", include={"index"})
            key = _training_key("training", PROBE_CODE, data, chosen.train, record.store, **index)
            computed = compute_once(record.store, key, Path(trained), train_here)
        else:  # the checkpoints contain the finished epochs
            computed = train_here()
        write_atomically(Path(curves), page("Training curves", training_curves(computed.output["epochs"])))
        record.save(training=computed.output)
        if computed.output["epochs"]:
            from evernear.embedding.artifact import HISTORY_FILE, TrainingResult
            from evernear.embedding.monitor import require_learned
            from evernear.embedding.recipe import with_defaults

            require_learned(TrainingResult.load(Path(trained) / HISTORY_FILE), with_defaults(chosen.train, data))
        running.summary = computed.summary


def _train(
    running: Step, record: RunRecord, data: "Dataset", chosen: RunSettings, trained: Path, clock: Clock
) -> Computed:
    from evernear.embedding.recipe import expected_probe_s, recipe_of_training, shown_images
    from evernear.evaluation.choice import train_and_choose

    recipe = recipe_of_training(chosen.train, data)
    started = min(step.started for step in record.steps())
    probe_s = expected_probe_s(recipe, chosen.evaluation.probe_epochs, data)
    rest_s = countdowns.REST_PRETRAINED_S if recipe.weights else countdowns.REST_S
    on_progress = countdowns.whole_run(running, started, probe_s, rest_s)
    on_epoch, on_step = countdowns.epochs(running, recipe.epochs), countdowns.training(running, on_progress)
    on_images = countdowns.images(running, shown_images(recipe, data), on_progress)
    if recipe.nodes > 1 and not recipe.keeps_backbone:
        from evernear.kubeflow.train_job import run_train_job

        run_train_job(record.run, data, recipe, chosen, on_epoch, running.report)
    result = train_and_choose(
        data, recipe, chosen.index, trained, record.store, on_epoch, on_step, on_images=on_images, clock=clock
    )
    output = {
        "epochs": result.history(),
        **result.model_dump(mode="json", include={"best_epoch", "views", "candidates"}),
    }
    return Computed(result.summary(), output, reusable=not result.warnings)


def _training_key(
    result: str, code: tuple[str, ...], data: "Dataset", settings: TrainingChoices, store: Store, **inputs: JsonValue
) -> str:
    """A key for what depends on images, training settings, pretrained weights and code, also of the
    loss."""
    from evernear.embedding.loss import loss_sha256
    from evernear.embedding.packaged_weights import weights_sha256

    initial = {"weights": weights_sha256(settings, store), "loss": loss_sha256(settings.loss)}
    train = settings.model_dump(mode="json")
    return result_key(result, code, LIBRARIES, dataset=data.digest, train=train, **initial, **inputs)


def export(run: str, settings: Tree, dataset: str, trained: str, network: str) -> Tree:
    """Export the network to TorchScript and for OpenVINO, and return the artifact's metadata."""
    with _step("export", run, settings) as (running, _, record):
        from evernear.data.shards import Dataset

        data = Dataset.open(Path(dataset))

        def export_here() -> Computed:
            from evernear.embedding.export import export_network

            on_images = countdowns.images(running, data.count("gallery"))
            result = export_network(Path(trained), data, Path(network), record.store, on_images)
            output = {"sha256": result.sha256, "parity_max_abs_difference": result.parity_max_abs_difference}
            return Computed(result.summary(), output)

        described = sha256_file(Path(trained) / DESCRIPTION_FILE)  # contains the sha256 of the weights
        inputs = {"dataset": data.digest, "trained": described}
        key = result_key("export", CODE, LIBRARIES, **inputs)
        exported = compute_once(record.store, key, Path(network), export_here)
        running.summary = exported.summary
    return exported.output


def reuse(run: str, settings: Tree, dataset: str, network: str, open_set: str) -> Tree:
    """Extract the champion's network and threshold, and return the metadata."""
    with _step("reuse", run, settings) as (running, _, record):
        from evernear.data.shards import Dataset
        from evernear.release.champion import reuse_network

        release, threshold = reuse_network(record.store, Dataset.open(Path(dataset)), Path(network))
        threshold.save(Path(open_set))
        for sentence in filter(None, [threshold.describe_kept_threshold(), threshold.describe_added()]):
            running.note(sentence)
        running.summary = f"network {release.network_sha256[:12]} of release {release.version}"
    return {"sha256": release.network_sha256, "release": release.version}


def embed(run: str, settings: Tree, dataset: str, network: str, embeddings: str) -> Tree:
    """Embed the gallery and query splits into the store, and return the artifact's metadata. Nodes
    also embed the test split, which evaluate then reads from the cache."""
    with _step("embed", run, settings) as (running, chosen, record):
        from evernear.common.parts import PARTS
        from evernear.data.shards import Dataset
        from evernear.embedding.embed import combine_embeddings, network_folder, open_here, plan_embedding
        from evernear.embedding.export import untrained_classes
        from evernear.kubeflow.nodes import StepNodes

        data, network_dir, store = Dataset.open(Path(dataset)), Path(network), record.store
        untrained = untrained_classes(network_dir, data, store, chosen.classes)
        nodes = StepNodes(chosen.index.nodes, running.report)
        splits = ("gallery", "query") if nodes.is_one else ("gallery", "query", "test")
        parts = plan_embedding(network_dir, data, store, f"{PARTS}{run}", untrained, splits)
        on_images = countdowns.images(running, parts.plan.units)
        open_worker = partial(open_here, network_dir, data, store, on_images)
        nodes.run(parts, open_worker, {network_folder(parts): network_dir})
        result = combine_embeddings(parts, network_dir, data, Path(embeddings), store.uri)
        record.save(parts_embed=nodes.ran)
        running.summary = result.summary() + nodes.summary()
    computed = result.count - result.reused
    return {"computed": computed, "reused": result.reused, "untrained_classes": sorted(untrained)}


def index(run: str, settings: Tree, dataset: str, embeddings: str, open_set: str, index: str) -> None:
    """Build the gallery's index, with the network's open-set threshold."""
    with _step("index", run, settings) as (running, chosen, record):
        from evernear.common.store.base import owner_of
        from evernear.data.group_numbers import group_numbers
        from evernear.data.shards import Dataset
        from evernear.embedding.embeddings import Embeddings
        from evernear.evaluation.open_set import OpenSet
        from evernear.index.build import build_index
        from evernear.index.calibrate import calibration_gaps

        data, vectors = Dataset.open(Path(dataset)), Embeddings.open(Path(embeddings))
        probed = OpenSet.load(Path(open_set))
        groups = group_numbers(data)
        seen = len(groups.seen_queries()) if groups else 0
        result = build_index(
            vectors,
            data.labels,
            chosen.index,
            Path(index),
            threshold=probed.threshold,
            relative_threshold=probed.relative_threshold,
            owner=owner_of(record.store) if chosen.index.backend != FAISS else "",
            groups=groups,
        )
        running.summary = result.summary() + calibration_gaps(data, result.known_labels, seen)


def probe(run: str, settings: Tree, dataset: str, open_set: str) -> None:
    """Measure how well unseen classes are rejected, and calibrate the threshold."""
    clock = Clock()
    with _step("probe", run, settings) as (running, chosen, record):
        from evernear.data.shards import Dataset
        from evernear.evaluation.open_set import OpenSet

        data = Dataset.open(Path(dataset))
        here = chosen.train.model_copy(update={"nodes": 1})  # the probe trains for fewer epochs
        training = record.load("training")
        views, candidates = training.get("views"), training.get("candidates", ())
        chosen_network = next((each["name"] for each in candidates if each["chosen"]), "fine-tuned")
        if chosen_network != "fine-tuned":
            of_head = {"layers": "head", "loss": ARCFACE, "processes": 1, "members": 1}
            here = here.model_copy(update=of_head | {"frozen": chosen_network == "pretrained"})

        def probe_here() -> Computed:
            from evernear.evaluation.probe import probe_open_set

            draws = countdowns.Trainings("draw", running.report, running.progressed)
            result = probe_open_set(
                data,
                here,
                chosen.evaluation,
                chosen.index,
                draws.on_step,
                record.store,
                draws.on_training,
                clock,
                views,
            )
            sentences = " ".join(filter(None, [result.summary(), result.describe_added()]))
            summary = sentences.removesuffix(".") or "too few classes to hold one out"
            return Computed(summary, result.model_dump(mode="json"))

        inputs = chosen.model_dump(mode="json", include={"evaluation", "index"})
        key = _training_key("probe", PROBE_CODE, data, here, record.store, views=views, **inputs)
        probed = compute_once(record.store, key, None, probe_here)
        OpenSet.model_validate(probed.output).save(Path(open_set))
        running.summary = probed.summary


def evaluate(
    run: str, settings: Tree, dataset: str, network: str, index: str, open_set: str, evaluation: str
) -> "Evaluation":
    """Evaluate candidate, champion and anchor, as deployed, on the same test split."""
    with _step("evaluate", run, settings) as (running, chosen, record), ExitStack() as stack:
        from evernear.data.shards import Dataset
        from evernear.data.validate import Report, near_duplicates_found
        from evernear.embedding.export import describe_network, training_dataset
        from evernear.evaluation.answer_table import ANSWERS_FILE, AnswerWriter
        from evernear.evaluation.baselines import few_groups
        from evernear.evaluation.corrected import CorrectedCounter
        from evernear.evaluation.evaluate import evaluate_systems
        from evernear.evaluation.example_collector import ExampleCollector
        from evernear.evaluation.open_set import OpenSet
        from evernear.evaluation.recognizer import Recognizer
        from evernear.release.champion import open_anchor, open_champion
        from evernear.review.answers import corrected_images
        from evernear.review.live_labels import with_live_figures
        from evernear.serving.replay import replay

        data, store, network_dir = Dataset.open(Path(dataset)), record.store, Path(network)
        candidate, probed = Recognizer.open(network_dir, Path(index), store=store), OpenSet.load(Path(open_set))
        trained_on, described = training_dataset(network_dir, data, store), describe_network(network_dir)
        champion = stack.enter_context(open_champion(store, chosen.classes))
        anchor = stack.enter_context(open_anchor(store, chosen.classes))
        collector = ExampleCollector(candidate, data)
        answers = Path(evaluation).with_name(ANSWERS_FILE)
        writer = stack.enter_context(AnswerWriter(answers, data.labels))
        corrected = CorrectedCounter(corrected_images(store))
        progress = countdowns.tests(running, data.count("test") * (2 if champion else 1))
        result = evaluate_systems(
            candidate,
            champion,
            data,
            probed,
            trained_on=trained_on,
            observers=(progress, collector.add, writer.add, corrected.add),
            champion_observers=(progress,),
            anchor=anchor,
            pretrained=_pretrained_features(running, record, data, chosen.train),
        )
        replayed, changed = replay(candidate, champion, store, chosen.serving.max_pixels) if champion else (None, None)
        near = near_duplicates_found(record.find("validation", Report), data, chosen.data.group)
        few = None if champion else few_groups(result.baselines, data, chosen.data, chosen.gate.significance)
        changes = {"corrected": corrected.counts(), "replay": replayed, "near_duplicates": near, "few_groups": few}
        changes |= {"training_warnings": described.training_warnings}
        result = result.model_copy(update=changes)
        result.write(Path(evaluation))
        readable = champion and "champion" not in result.unreadable
        examples = collector.finish(champion.dataset if champion and readable else None)
        examples = with_live_figures(examples, store, result.champion)
        record.save(evaluation=result, examples=examples, replay=changed)
        running.summary = result.summary()
        stack.close()  # the table of answers is complete
        record.put(ANSWERS_FILE, answers)
    return result


def _pretrained_features(
    running: Step, record: RunRecord, data: "Dataset", train: TrainSettings
) -> "FrozenFeatures | None":
    """The features of the weights from which this run trained, or None if it did not."""
    if not train.weights or not record.load("training"):
        return None
    from evernear.data.manifest import SPLITS
    from evernear.embedding.freeze import open_pretrained
    from evernear.embedding.recipe import with_defaults

    frozen = with_defaults(train.model_copy(update={"frozen": True, "members": 1}), data)
    on_images = countdowns.images(running, sum(data.count(split) for split in SPLITS))
    return open_pretrained(data, frozen, record.store, on_images).features


def gate(run: str, settings: Tree, evaluation: str, verdict: str) -> bool:
    with _step("gate", run, settings) as (running, chosen, record):
        from evernear.evaluation.evaluate import Evaluation
        from evernear.evaluation.gate import decide
        from evernear.reporting.notify import CONFUSION_MATRIX
        from evernear.reporting.plots import confusion_png

        measured = Evaluation.open(Path(evaluation))
        decision = decide(measured, chosen.gate)
        decision.save(Path(verdict))
        record.save(verdict=decision, metrics=measured.metrics())
        record.put(CONFUSION_MATRIX, confusion_png(measured))
        running.summary = decision.summary()
    return decision.promote


def archive(run: str, settings: Tree, dataset: str, parts: dict[str, str], release: str) -> str:
    """Pack and publish the release, even if held, so that a user can promote it. Return its
    version. ``parts`` maps ``network``, ``index`` and ``evaluation`` to directories, ``verdict`` to
    a file."""
    with _step("archive", run, settings) as (running, chosen, record):
        from evernear.evaluation.verdict import Verdict
        from evernear.release.archive import Candidate, make_archive
        from evernear.release.manifest import git_commit
        from evernear.release.registry import Registry
        from evernear.serving import HANDLER

        candidate = Candidate.open(Path(dataset), {name: Path(part) for name, part in parts.items()})
        packed = make_archive(candidate, chosen.serving, HANDLER, Path(release), store=record.store)
        if not packed.manifest.git_commit:
            git_commit(lambda reason: running.note(f"The release does not name a commit: {reason}"))
        if not Verdict.load(candidate.verdict_file).promote:
            Registry(record.store).publish(packed.archive)
        record.save(archived={"version": packed.manifest.version})
        running.summary = packed.summary()
    return packed.manifest.version


def deploy(run: str, settings: Tree, started_by: str, release: str, verdict: str) -> None:
    with _step("deploy", run, settings) as (running, chosen, record):
        from evernear.deployment import deploy_release
        from evernear.release.archive_reader import ARCHIVE_FILE
        from evernear.release.promotions import Cause

        cause = Cause.of_run(run, started_by)
        deployed = deploy_release(Path(release) / ARCHIVE_FILE, Path(verdict), chosen, cause)
        record.save(deployment=deployed)
        running.summary = f"release {deployed.version} {deployed.state()}"


def rollback(run: str, store: str, target: str, settings: Tree, release: str, reason: str, started_by: str) -> None:
    """Roll back to the previous champion. If ``release`` is set, it must be the current one."""
    given = with_uploaded(
        {"store": store, "target": target, "settings": settings, "release": release, "reason": reason}
    )
    with step("rollback", run, given["store"]) as running:
        from evernear.deployment import roll_back
        from evernear.release.promotions import Cause

        record, chosen = RunRecord(current_store(given["store"]), run), resolve(given)
        cause = Cause.of_run(run, started_by, given["reason"])
        restored = roll_back(chosen, cause=cause, expected=given["release"] or None)
        record.save(rollback=restored.model_dump(mode="json") | {"why": cause.why})
        running.summary = f"restored: release {restored.version} {restored.state()}"


def promote(run: str, store: str, target: str, settings: Tree, release: str, reason: str, started_by: str) -> None:
    """Deploy a release, even a held one. If it is empty, apply the settings to the champion."""
    given = with_uploaded(
        {"store": store, "target": target, "settings": settings, "release": release, "reason": reason}
    )
    with step("promote", run, given["store"]) as running:
        from evernear.deployment import apply as apply_settings
        from evernear.deployment import promote_release
        from evernear.release.promotions import Cause

        record, chosen = RunRecord(current_store(given["store"]), run), resolve(given)
        cause = Cause.of_run(run, started_by, given["reason"])
        if given["release"]:
            promoted = promote_release(given["release"], chosen, force=True, cause=cause)
        else:
            promoted = apply_settings(chosen, cause=cause)
        record.save(promotion=promoted.model_dump(mode="json") | {"why": cause.why})
        running.summary = f"release {promoted.version} {promoted.state()}"


def predict(run: str, store: str, images: str, out: str, release: str, nodes: int) -> None:
    """Recognize all ``images`` with a release or the champion, as Parquet files."""
    given = {"store": store, "images": images, "out": out, "release": release, "nodes": nodes}
    given = with_uploaded(given)
    store, images, out, release, nodes = given.values()
    with step("predict", run, store) as running:
        from evernear.kubeflow.nodes import StepNodes
        from evernear.release.registry import Registry
        from evernear.serving.batch import Shared, open_worker, plan_predictions, summarize

        resolve(given)
        registry = Registry(current_store(store))
        pods = StepNodes(nodes, running.report)
        version = registry.get(release).manifest.version if release else registry.require_champion().version
        parts = plan_predictions(Shared(source=images, store_uri=store, version=version), open_store(out))
        pods.run(parts, partial(open_worker, on_images=countdowns.images(running, parts.plan.units)))
        summary = summarize(parts)
        summary.require_predictions(images)
        headline = f"{summary.predicted()} by release {version} in {parts.store.uri}"
        RunRecord(registry.store, run).save(predictions={"version": version, "summary": headline})
        left_out = f"; {summary.left_out()}" if summary.errors else ""
        running.summary = headline + pods.summary() + left_out


def notify(run: str, store: str, pipeline: str, state: str, error_message: str, outcome: str, page: str) -> Tree:
    """Record the outcome as JSON and as the run page, and return its metadata."""
    store = with_uploaded({"store": store})["store"]
    with step("notify", run, store) as running:
        from evernear.reporting.notify import command_to_repeat, finalize
        from evernear.reporting.page import run_page

        record = RunRecord(current_store(store), run)
        result = finalize(record, pipeline, state, printable(error_message), command_to_repeat(record))
        result.save(Path(outcome))
        html = run_page(record)
        write_atomically(Path(page), html)
        record.put("run.html", html.encode())
        running.summary = result.without_reasons() + warned(run_ended(record, html))
    return {"state": result.state, "release": result.release or "", "summary": result.summary()}


@contextmanager
def _step(name: str, run: str, settings: Tree) -> Generator[tuple[Step, OneRun, RunRecord]]:
    """Run a step after `ingest` with the settings that it resolved and the run's record."""
    chosen = parse(OneRun, settings)
    with step(name, run, chosen.store_uri) as running:
        yield running, chosen, RunRecord(current_store(chosen.store_uri), run)
