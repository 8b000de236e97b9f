"""The main job, from new labelled images to a gated release that serves. Start reading here.

Each step is a component of the same name under ``components/``, and each component is one call into the room of
the package that does the work. Settings travel by section, so that a new gate bound does not retrain a network.
"""

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
from evernear.settings import Settings
from pipelines.tasks import CONFIG, RUN, accelerate, equip, fresh, let_predict, mount_scratch

DEFAULTS = Settings()


@dsl.pipeline(
    name="continuous-training",
    display_name="Continuous training",
    description="New labelled images in, a gated release served by TorchServe.",
    pipeline_config=CONFIG,
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
    kubernetes_settings: dict = DEFAULTS.kubernetes.model_dump(mode="json"),
    target: str = "registry",
    workdir: str = "",
    s3_secret: str = "evernear-s3",
    token_secret: str = "evernear-token",
    scratch_claim: str = "evernear-scratch",
    cpu: str = "2",
    memory: str = "4G",
    train_cpu: str = "4",
    train_memory: str = "8G",
    accelerator: str = "nvidia.com/gpu",
    accelerators: str = "0",
):
    """Ingest, validate, train, export, embed, index, evaluate, gate, archive; if better: deploy. Always notify.

    Args:
        store: Object store of datasets, checkpoints and releases: s3://bucket/prefix or file:///path.
        data: Source of the images, splits and shards.
        validation: Which faults of the data stop the run.
        train_settings: Embedding network, ArcFace head and training loop.
        index_settings: FAISS index, labelling rule and open-set threshold.
        evaluation: Intervals and the open-set probe.
        gate_settings: Bounds that a challenger has to keep.
        serving: The TorchServe that answers predictions.
        kubernetes_settings: The Deployment that serves in a cluster; only for target kubernetes.
        target: Where a promoted release goes: registry (publish only), kubernetes (a Deployment), local (this machine).
        workdir: Working directory of a local TorchServe; only for target local.
        s3_secret: Kubernetes Secret whose keys AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID ... open the store.
        token_secret: Kubernetes Secret whose key token inference asks for, where kubernetes_settings names one.
        scratch_claim: PersistentVolumeClaim (ReadWriteMany) where steps keep copies of the shards they read.
        cpu: CPU limit of each step that does not train.
        memory: Memory limit of each step that does not train.
        train_cpu: CPU limit of the steps that train.
        train_memory: Memory limit of the steps that train.
        accelerator: Kubernetes resource that the steps that train may have, nvidia.com/gpu for one.
        accelerators: How many of it, as text; 0 also suits a cluster that has none.
    """
    told = fresh(notify(run=RUN, store=store))
    with dsl.ExitHandler(told, name="from images to a release"):
        ingested = fresh(ingest(store=store, settings=data))
        dataset = ingested.outputs["dataset"]
        validated = fresh(validate(store=store, settings=validation, dataset=dataset))

        trained = train(store=store, settings=train_settings, dataset=dataset).after(validated)
        exported = export(settings=train_settings, dataset=dataset, trained=trained.outputs["trained"])
        network = exported.outputs["network"]
        embedded = embed(store=store, dataset=dataset, network=network)
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

        archived = fresh(
            archive(
                run=RUN,
                store=store,
                settings=serving,
                dataset=dataset,
                network=network,
                index=indexed.outputs["index"],
                evaluation=measured,
                verdict=gated.outputs["verdict"],
            )
        )

        with dsl.If(gated.outputs["Output"] == True, "better than what serves"):  # noqa: E712 - kfp's condition
            deployed = fresh(
                deploy(
                    run=RUN,
                    store=store,
                    target=target,
                    workdir=workdir,
                    settings=serving,
                    kubernetes=kubernetes_settings,
                    release=archived.outputs["release"],
                    verdict=gated.outputs["verdict"],
                )
            )

    training = (trained, probed)
    others = (told, ingested, validated, exported, embedded, indexed, evaluated, gated, archived, deployed)
    equip(others, s3_secret, cpu, memory)
    equip(training, s3_secret, train_cpu, train_memory)
    let_predict(deployed, token_secret)
    accelerate(training, accelerator, accelerators)
    mount_scratch((*training, *others), scratch_claim)
