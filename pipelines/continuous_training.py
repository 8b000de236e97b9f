"""The main job, from new labelled images to a gated release that serves. Start reading here.

Each step is a component of the same name under ``components/``, and each component is one call into the room of
the package that does the work. Settings travel by section, so that a new gate bound does not retrain a network.
"""

from kfp import dsl, kubernetes

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
from evernear.settings import Settings

DEFAULTS = Settings()
RUN = dsl.PIPELINE_JOB_ID_PLACEHOLDER


S3_KEYS = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION")


def fresh(task: dsl.PipelineTask) -> dsl.PipelineTask:
    """Never from KFP's cache: the task looks at the world (a source, the champion, a cluster), not just at inputs."""
    return task.set_caching_options(enable_caching=False)


@dsl.pipeline(
    name="continuous-training",
    display_name="Continuous training",
    description="New labelled images in, a gated release served by TorchServe.",
)
def continuous_training(
    store: str = "s3://evernear",
    data: dict = DEFAULTS.data.model_dump(),
    validation: dict = DEFAULTS.validation.model_dump(),
    train_settings: dict = DEFAULTS.train.model_dump(),
    index_settings: dict = DEFAULTS.index.model_dump(),
    evaluation: dict = DEFAULTS.evaluation.model_dump(),
    gate_settings: dict = DEFAULTS.gate.model_dump(),
    serving: dict = DEFAULTS.serving.model_dump(),
    target: str = "registry",
    workdir: str = "",
    s3_secret: str = "evernear-s3",
    scratch_claim: str = "evernear-scratch",
    train_cpu: str = "4",
    train_memory: str = "8G",
):
    """Ingest, validate, train, export, embed, index, evaluate, gate; if better: archive and deploy. Always notify.

    Args:
        store: Object store of datasets, checkpoints and releases: s3://bucket/prefix or file:///path.
        data: Source of the images, splits and shards.
        validation: Which faults of the data stop the run.
        train_settings: Embedding network, ArcFace head and training loop.
        index_settings: FAISS index, labelling rule and open-set threshold.
        evaluation: Intervals and the open-set probe.
        gate_settings: Bounds that a challenger has to keep.
        serving: The TorchServe that answers predictions.
        target: Where a promoted release goes: registry (publish only) or local (TorchServe on this machine).
        workdir: Working directory of a local TorchServe; only for target local.
        s3_secret: Kubernetes Secret whose keys AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID ... open the store.
        scratch_claim: PersistentVolumeClaim (ReadWriteMany) where steps keep copies of the shards they read.
        train_cpu: CPU limit of the steps that train.
        train_memory: Memory limit of the steps that train.
    """
    told = fresh(notify(run=RUN, store=store))
    with dsl.ExitHandler(told):
        ingested = fresh(ingest(store=store, settings=data))
        dataset = ingested.outputs["dataset"]
        validated = fresh(validate(store=store, settings=validation, dataset=dataset))

        trained = train(store=store, settings=train_settings, dataset=dataset).after(validated)
        exported = export(settings=train_settings, dataset=dataset, trained=trained.outputs["trained"])
        network = exported.outputs["network"]
        embedded = embed(dataset=dataset, network=network)
        probed = probe(train=train_settings, index=index_settings, settings=evaluation, dataset=dataset)
        open_set = probed.after(validated).outputs["open_set"]
        indexed = index(
            settings=index_settings, dataset=dataset, embeddings=embedded.outputs["embeddings"], open_set=open_set
        )

        evaluated = fresh(
            evaluate(
                store=store,
                settings=evaluation,
                dataset=dataset,
                network=network,
                index=indexed.outputs["index"],
                open_set=open_set,
            )
        )
        measured = evaluated.outputs["evaluation"]
        gated = fresh(gate(run=RUN, store=store, settings=gate_settings, evaluation=measured))

        with dsl.If(gated.outputs["Output"] == True, "better than what serves"):  # noqa: E712 - kfp's condition
            archived = fresh(
                archive(
                    settings=serving,
                    dataset=dataset,
                    network=network,
                    index=indexed.outputs["index"],
                    evaluation=measured,
                    verdict=gated.outputs["verdict"],
                )
            )
            deployed = fresh(
                deploy(
                    run=RUN,
                    store=store,
                    target=target,
                    workdir=workdir,
                    settings=serving,
                    release=archived.outputs["release"],
                    verdict=gated.outputs["verdict"],
                )
            )

    read_images = (ingested, trained, exported, embedded, probed, evaluated, archived)
    for task in read_images:
        kubernetes.mount_pvc(task, scratch_claim, "/scratch")
    for task in (*read_images, validated, indexed, gated, deployed, told):
        kubernetes.use_secret_as_env(task, s3_secret, {key: key for key in S3_KEYS}, optional=True)
    for task in (trained, probed):
        # kfp 2.17 forgets to hand parameters of a limit to the group that the task stands in.
        task.register_pipeline_channels([train_cpu, train_memory])
        task.set_cpu_limit(train_cpu).set_memory_limit(train_memory)
