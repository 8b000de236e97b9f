"""The second half of `continuous_training` and of `reindex`: from a network to a gated, deployed release."""

from kfp import dsl
from kfp.dsl.pipeline_channel import PipelineChannel as Channel

from components.archive import archive
from components.deploy import deploy
from components.embed import embed
from components.evaluate import evaluate
from components.gate import gate
from components.index import index
from pipelines.tasks import RUN


def make_release(
    settings: Channel, dataset: Channel, network: Channel, open_set: Channel, started_by: str
) -> tuple[dsl.PipelineTask, ...]:
    """Embed, index, evaluate, gate and archive; deploy if the gate promotes. Returns the tasks."""
    embedded = embed(run=RUN, settings=settings, dataset=dataset, network=network)
    embeddings = embedded.outputs["embeddings"]
    indexed = index(run=RUN, settings=settings, dataset=dataset, embeddings=embeddings, open_set=open_set)
    candidate = {"network": network, "index": indexed.outputs["index"]}

    evaluated = evaluate(run=RUN, settings=settings, dataset=dataset, open_set=open_set, **candidate)
    evaluation = evaluated.outputs["evaluation"]
    gated = gate(run=RUN, settings=settings, evaluation=evaluation)
    decision = {"evaluation": evaluation, "verdict": gated.outputs["verdict"]}

    archived = archive(run=RUN, settings=settings, dataset=dataset, **candidate, **decision)
    with dsl.If(gated.outputs["Output"] == True, "not worse than the champion"):  # noqa: E712 - kfp's condition
        deployed = deploy(
            run=RUN,
            settings=settings,
            started_by=started_by,
            release=archived.outputs["release"],
            verdict=decision["verdict"],
        )
    return embedded, indexed, evaluated, gated, archived, deployed
