"""New gallery images, a whole new class even, with the champion's network: no training, no export.

Recognition is embedding + nearest neighbor, so the index alone has to learn a new class. The candidate is gated,
archived and deployed as after a training.
"""

from typing import Any

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
from pipelines.tasks import CONFIG, RUN, configure_tasks, mount_inference_token, mount_scratch


@dsl.pipeline(  # pyright: ignore[reportUntypedFunctionDecorator]
    name="reindex",
    display_name="Reindex",
    description="New gallery images in, a gated release of the champion's network.",
    pipeline_config=CONFIG,
)
def reindex(
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
):
    """Ingest, validate, reuse, embed what is new, index, evaluate, gate, archive; if not worse: deploy. Notify.

    Args:
        source: Images: s3://bucket/prefix with one folder per class, digits, or mnist; the champion's. Empty: digits.
        preset: Settings that come with evernear: best, fast or quick. Empty: the defaults.
        settings: Other settings to change, such as {"index": {"k": 9}, "gate": {"accuracy_floor": 0.9}}.
        target: Where a promoted release goes: registry (publish only), kubernetes (a Deployment), local (this machine).
        serving_image: Image of the serving pods by digest, REF@sha256:...; required for target kubernetes.
        started_by: Who or what starts the run, for the champion's history.
        store: Object store of datasets, checkpoints and releases: s3://bucket/prefix or file:///path.
        task_cpu: CPU limit of each step.
        task_memory: Memory limit of each step.
        task_s3_secret: Secret with the keys of the store, AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID ...
        task_scratch_claim: PersistentVolumeClaim (ReadWriteMany) where steps keep copies of the shards they read.
        task_token_secret: Secret whose key token is the inference token, if kubernetes.token_secret names one.
    """
    notified = notify(run=RUN, store=store, pipeline="reindex")
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

        reused = reuse(run=RUN, settings=chosen, dataset=dataset).after(validated)
        network, open_set = reused.outputs["network"], reused.outputs["open_set"]
        embedded = embed(run=RUN, settings=chosen, dataset=dataset, network=network)
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

    tasks = (notified, ingested, validated, reused, embedded, indexed, evaluated, gated, archived, deployed)
    configure_tasks(tasks, task_s3_secret, task_cpu, task_memory)
    mount_inference_token(deployed, task_token_secret)
    mount_scratch(tasks, task_scratch_claim)
