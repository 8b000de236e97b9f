"""What served before the champion serves again."""

from kfp import dsl

from components.notify import notify
from components.rollback import rollback as take_back
from evernear.settings import Settings
from pipelines.tasks import CONFIG, RUN, equip, fresh, let_predict

DEFAULTS = Settings()


@dsl.pipeline(
    name="rollback",
    display_name="Rollback",
    description="What served before the champion serves again, once it has proved that it answers.",
    pipeline_config=CONFIG,
)
def rollback(
    why: str = "",
    release: str = "",
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
    """Take the champion's last move back. Always notify.

    Args:
        why: The reason, for the history and for whoever is told.
        release: Release that is to go; if another one serves by then, nothing happens. Empty: whatever serves.
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
    with dsl.ExitHandler(told, name="back to the release before"):
        taken_back = fresh(
            take_back(
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

    equip((told, taken_back), s3_secret, cpu, memory)
    let_predict(taken_back, token_secret)
