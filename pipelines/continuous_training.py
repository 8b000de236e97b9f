"""The main job, from new labelled images to a gated release that serves. Start reading here.

Each step is a component of the same name under ``components/``, and each component is one call into the room of
the package that does the work. The first step resolves the settings of the run; all others take what it returns.
"""

from typing import Any

from kfp import dsl

from components.archive import archive
from components.deploy import deploy
from components.embed import embed
from components.evaluate import evaluate
from components.export import export
from components.gate import gate
from components.index import index
from components.ingest import ingest
from components.notify import notify
from components.probe import probe
from components.train import train
from components.validate import validate
from pipelines.tasks import CONFIG, RUN, configure_tasks, mount_inference_token, mount_scratch, set_accelerator


@dsl.pipeline(  # pyright: ignore[reportUntypedFunctionDecorator]
    name="continuous-training",
    display_name="Continuous training",
    description="New labelled images in, a gated release served by TorchServe.",
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
    task_cpu: str = "2",
    task_memory: str = "4G",
    task_s3_secret: str = "evernear-s3",
    task_scratch_claim: str = "evernear-scratch",
    task_token_secret: str = "evernear-token",
    train_accelerator: str = "nvidia.com/gpu",
    train_accelerators: str = "0",
    train_cpu: str = "4",
    train_memory: str = "8G",
):
    """Ingest, validate, train, export, embed, index, evaluate, gate, archive; if not worse: deploy. Always notify.

    Args:
        source: Images to train on: s3://bucket/prefix with one folder per class, digits, or mnist. Empty: digits.
        preset: Settings that come with evernear: best, fast or quick. Empty: the defaults.
        settings: Other settings to change, such as {"train": {"epochs": 20}, "gate": {"accuracy_floor": 0.9}}.
        target: Where a promoted release goes: registry (publish only), kubernetes (a Deployment), local (this machine).
        serving_image: Image of the serving pods by digest, REF@sha256:...; required for target kubernetes.
        started_by: Who or what starts the run, for the champion's history.
        store: Object store of datasets, checkpoints and releases: s3://bucket/prefix or file:///path.
        task_cpu: CPU limit of each step that does not train.
        task_memory: Memory limit of each step that does not train.
        task_s3_secret: Secret with the keys of the store, AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID ...
        task_scratch_claim: PersistentVolumeClaim (ReadWriteMany) where steps keep copies of the shards they read.
        task_token_secret: Secret whose key token is the inference token, if kubernetes.token_secret names one.
        train_accelerator: Kubernetes resource of the steps that train, such as nvidia.com/gpu.
        train_accelerators: Number of them, as text; 0 also suits a cluster that has none.
        train_cpu: CPU limit of the steps that train.
        train_memory: Memory limit of the steps that train.
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
        )
        dataset, chosen = ingested.outputs["dataset"], ingested.outputs["Output"]
        validated = validate(run=RUN, settings=chosen, dataset=dataset)

        trained = train(run=RUN, settings=chosen, dataset=dataset).after(validated)
        exported = export(run=RUN, settings=chosen, dataset=dataset, trained=trained.outputs["trained"])
        network = exported.outputs["network"]
        embedded = embed(run=RUN, settings=chosen, dataset=dataset, network=network)
        probed = probe(run=RUN, settings=chosen, dataset=dataset).after(validated)
        open_set = probed.outputs["open_set"]
        indexed = index(
            run=RUN,
            settings=chosen,
            dataset=dataset,
            embeddings=embedded.outputs["embeddings"],
            open_set=open_set,
        )

        evaluated = evaluate(
            run=RUN,
            settings=chosen,
            dataset=dataset,
            network=network,
            index=indexed.outputs["index"],
            open_set=open_set,
        )
        measured = evaluated.outputs["evaluation"]
        gated = gate(run=RUN, settings=chosen, evaluation=measured)

        archived = archive(
            run=RUN,
            settings=chosen,
            dataset=dataset,
            network=network,
            index=indexed.outputs["index"],
            evaluation=measured,
            verdict=gated.outputs["verdict"],
        )

        with dsl.If(gated.outputs["Output"] == True, "not worse than the champion"):  # noqa: E712 - kfp's condition
            deployed = deploy(
                run=RUN,
                settings=chosen,
                started_by=started_by,
                release=archived.outputs["release"],
                verdict=gated.outputs["verdict"],
            )

    training = (trained, probed)
    others = (notified, ingested, validated, exported, embedded, indexed, evaluated, gated, archived, deployed)
    configure_tasks(others, task_s3_secret, task_cpu, task_memory)
    configure_tasks(training, task_s3_secret, train_cpu, train_memory)
    mount_inference_token(deployed, task_token_secret)
    set_accelerator(training, train_accelerator, train_accelerators)
    mount_scratch((*training, *others), task_scratch_claim)
