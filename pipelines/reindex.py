"""New gallery images, a whole new class even, with the network that serves: no training, no export.

Recognition is embedding + nearest neighbour, so that the index alone has to learn of a new class. What is promoted is
gated, archived and deployed as after a training.
"""

from kfp import dsl

from components.archive import archive
from components.deploy import deploy
from components.embed import embed
from components.evaluate import evaluate
from components.gate import gate
from components.index import index
from components.ingest import ingest
from components.notify import notify
from components.reuse import reuse
from components.validate import validate
from evernear.settings import Settings
from pipelines.tasks import CONFIG, RUN, equip, fresh, let_predict, mount_scratch

DEFAULTS = Settings()


@dsl.pipeline(
    name="reindex",
    display_name="Reindex",
    description="New gallery images in, a gated release of the network that serves already.",
    pipeline_config=CONFIG,
)
def reindex(
    store: str = "s3://evernear",
    data: dict = DEFAULTS.data.model_dump(),
    validation: dict = DEFAULTS.validation.model_dump(),
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
):
    """Ingest, validate, reuse, embed what is new, index, evaluate, gate, archive; if better: deploy. Always notify.

    Args:
        store: Object store of datasets, checkpoints and releases: s3://bucket/prefix or file:///path.
        data: Source of the images, splits and shards; the one that the champion was made from.
        validation: Which faults of the data stop the run.
        index_settings: FAISS index and labelling rule; the open-set threshold is the champion's.
        evaluation: Confidence of the intervals.
        gate_settings: Bounds that a challenger has to keep.
        serving: The TorchServe that answers predictions.
        kubernetes_settings: The Deployment that serves in a cluster; only for target kubernetes.
        target: Where a promoted release goes: registry (publish only), kubernetes (a Deployment), local (this machine).
        workdir: Working directory of a local TorchServe; only for target local.
        s3_secret: Kubernetes Secret whose keys AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID ... open the store.
        token_secret: Kubernetes Secret whose key token inference asks for, where kubernetes_settings names one.
        scratch_claim: PersistentVolumeClaim (ReadWriteMany) where steps keep copies of the shards they read.
        cpu: CPU limit of each step.
        memory: Memory limit of each step.
    """
    told = fresh(notify(run=RUN, store=store))
    with dsl.ExitHandler(told, name="from images to a release"):
        ingested = fresh(ingest(store=store, settings=data))
        dataset = ingested.outputs["dataset"]
        validated = fresh(validate(store=store, settings=validation, dataset=dataset))

        reused = fresh(reuse(store=store, dataset=dataset).after(validated))
        network, open_set = reused.outputs["network"], reused.outputs["open_set"]
        embedded = embed(store=store, dataset=dataset, network=network)
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

    tasks = (told, ingested, validated, reused, embedded, indexed, evaluated, gated, archived, deployed)
    equip(tasks, s3_secret, cpu, memory)
    let_predict(deployed, token_secret)
    mount_scratch(tasks, scratch_claim)
