"""A release that was held, or served before, serves because a person says so."""

from kfp import dsl

from components.notify import notify
from components.promote import promote as overrule
from evernear.settings import Settings
from pipelines.tasks import CONFIG, RUN, equip, fresh, let_predict

DEFAULTS = Settings()


@dsl.pipeline(
    name="promote",
    display_name="Promote",
    description="A release of the registry serves because a person says so, once it has proved that it answers.",
    pipeline_config=CONFIG,
)
def promote(
    release: str = "",
    why: str = "",
    by: str = "",
    store: str = "s3://evernear",
    serving: dict = DEFAULTS.serving.model_dump(),
    kubernetes_settings: dict = DEFAULTS.kubernetes.model_dump(mode="json"),
    target: str = "registry",
    workdir: str = "",
    s3_secret: str = "evernear-s3",
    token_secret: str = "evernear-token",
    cpu: str = "2",
    memory: str = "4G",
):
    """Let a release serve, also against its verdict. Always notify.

    Args:
        release: Version of the release, as `evernear registry list` has it; has to be given.
        why: The reason, for the history and for whoever is told; has to be given.
        by: Who wants it, for the history; empty: the account of this run.
        store: Object store of the releases: s3://bucket/prefix or file:///path.
        serving: The TorchServe that answers predictions.
        kubernetes_settings: The Deployment that serves in a cluster; only for target kubernetes.
        target: Where it serves: registry (the pointer alone), kubernetes (a Deployment), local (this machine).
        workdir: Working directory of a local TorchServe; only for target local.
        s3_secret: Kubernetes Secret whose keys AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID ... open the store.
        token_secret: Kubernetes Secret whose key token inference asks for, where kubernetes_settings names one.
        cpu: CPU limit of each step.
        memory: Memory limit of each step.
    """
    told = fresh(notify(run=RUN, store=store))
    with dsl.ExitHandler(told, name="to the release that a person chose"):
        overruled = fresh(
            overrule(
                run=RUN,
                store=store,
                target=target,
                workdir=workdir,
                settings=serving,
                kubernetes=kubernetes_settings,
                release=release,
                why=why,
                by=by,
            )
        )

    equip((told, overruled), s3_secret, cpu, memory)
    let_predict(overruled, token_secret)
