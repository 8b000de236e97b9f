"""Reindex: new gallery images, even of a new class, with the champion's network and without training.

Recognition is an embedding and a nearest-neighbor search, so a new class only needs new vectors in the index. The
candidate is evaluated, gated, archived and deployed as after training.
"""

from typing import Any

from kfp import dsl

from components.ingest import ingest
from components.notify import notify
from components.reuse import reuse
from components.validate import validate
from pipelines.release import make_release
from pipelines.tasks import CONFIG, RUN, configure_tasks


@dsl.pipeline(  # pyright: ignore[reportUntypedFunctionDecorator]
    name="reindex",
    display_name="Reindex",
    description="Indexes new gallery images with the champion's network, without training.",
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
):
    """Ingest, validate, reuse, embed what is new, index, evaluate, gate, archive; if not worse: deploy. Notify.

    Args:
        source: Images: s3://bucket/prefix with one folder per class, as for the champion; required.
        preset: Settings that come with evernear: best, fast, frozen, photos or quick. Empty: the defaults.
        settings: Other settings to change, such as {"index": {"k": 9}, "gate": {"accuracy_floor": 0.9}}.
        target: Where a promoted release goes: registry (publish only), kubernetes (a Deployment), local (this machine).
        serving_image: Image of the serving pods by digest, REF@sha256:...; required for target kubernetes.
        started_by: Who or what starts the run, for the champion's history.
        store: Object store of datasets, checkpoints and releases: s3://bucket/prefix or file:///path.
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
        release_tasks = make_release(chosen, dataset, reused.outputs["network"], reused.outputs["open_set"], started_by)

    configure_tasks((notified, ingested, validated, reused, *release_tasks))
