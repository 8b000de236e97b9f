"""The main job: from new labeled images to a gated, deployed release. Start reading here.

Each step is a component of the same name in ``components/``. It calls the function of the same name in
``evernear.steps``, which calls the package that does the work. The first step resolves the settings of the run, and the
other steps receive its result.
"""

from typing import Any

from kfp import dsl

from components.export import export
from components.ingest import ingest
from components.notify import notify
from components.probe import probe
from components.train import train
from components.validate import validate
from pipelines.release import make_release
from pipelines.tasks import CONFIG, RUN, configure_tasks


@dsl.pipeline(  # pyright: ignore[reportUntypedFunctionDecorator]
    name="continuous-training",
    display_name="Continuous training",
    description="Trains on new labeled images and deploys the release if it passes the gate.",
    pipeline_config=CONFIG,
)
def continuous_training(
    source: str = "",
    preset: str = "",
    settings: dict[str, Any] = {},
    target: str = "registry",
    serving_image: str = "",
    started_by: str = "",
    store: str = "s3://evernear",
    train_accelerators: str = "0",
):
    """Ingest, validate, train, export, embed, index, evaluate, gate, archive; if not worse: deploy. Always notify.

    Args:
        source: Images to train on, required: s3://bucket/prefix with one folder per class, table:s3://bucket/labels.csv.
        preset: Settings that come with evernear: best, fast, frozen, photos or quick. Empty: the defaults.
        settings: Other settings to change, such as {"train": {"epochs": 20}, "gate": {"accuracy_floor": 0.9}}.
        target: Where a promoted release goes: registry (publish only), kubernetes (a Deployment), local (this machine).
        serving_image: Image of the serving pods by digest, REF@sha256:...; required for target kubernetes.
        started_by: Who or what starts the run, for the champion's history.
        store: Object store of datasets, checkpoints and releases: s3://bucket/prefix or file:///path.
        train_accelerators: Number of GPUs of the steps that train, as text; 0 also suits a cluster that has none.
    """
    notified = notify(run=RUN, store=store, pipeline="continuous-training")
    with dsl.ExitHandler(notified, name="from images to a release"):
        ingested = ingest(
            run=RUN,
            store=store,
            source=source,
            preset=preset,
            target=target,
            serving_image=serving_image,
            settings=settings,
            train_accelerators=train_accelerators,
        )
        dataset, chosen = ingested.outputs["dataset"], ingested.outputs["Output"]
        validated = validate(run=RUN, settings=chosen, dataset=dataset)

        trained = train(run=RUN, settings=chosen, dataset=dataset).after(validated)
        exported = export(run=RUN, settings=chosen, dataset=dataset, trained=trained.outputs["trained"])
        # The probe of a frozen backbone reads the features that the train step has computed.
        probed = probe(run=RUN, settings=chosen, dataset=dataset).after(trained)
        network, open_set = exported.outputs["network"], probed.outputs["open_set"]
        release_tasks = make_release(chosen, dataset, network, open_set, started_by)

    tasks = (notified, ingested, validated, trained, exported, probed, *release_tasks)
    configure_tasks(tasks, train_accelerators)
