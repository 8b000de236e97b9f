"""Predict: the images of a whole source through a release, without a server, into Parquet files."""

from kfp import dsl

from components.notify import notify
from components.predict import predict as predict_images
from pipelines.tasks import CONFIG, RUN, configure_tasks


@dsl.pipeline(  # pyright: ignore[reportUntypedFunctionDecorator]
    name="predict",
    display_name="Predict",
    description="Recognizes all images of a source with a release, and writes the predictions as Parquet files.",
    pipeline_config=CONFIG,
)
def predict(
    images: str = "",
    out: str = "",
    release: str = "",
    nodes: int = 1,
    store: str = "s3://evernear",
):
    """Recognize all images of a source with a release, then notify. A second run with the same arguments continues.

    Args:
        images: Images to recognize, at any depth and without classes: s3://bucket/prefix; required.
        out: Folder of the Parquet files: s3://bucket/prefix; required.
        release: Version of the release; empty: the champion.
        nodes: Pods that share the work; above 1 with deploy/components/many-machines.
        store: Object store of the releases: s3://bucket/prefix or file:///path.
    """
    notified = notify(run=RUN, store=store, pipeline="predict")
    with dsl.ExitHandler(notified, name="recognize images"):
        predicted = predict_images(run=RUN, store=store, images=images, out=out, release=release, nodes=nodes)
    configure_tasks((notified, predicted))
