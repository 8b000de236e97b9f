"""Look at everything that evernear depends on before anything is started: what is missing, and how to mend it.

Each part is tried for real, with the identity and the settings of this process. Nothing is changed but one small
object of the store, ``doctor.json``.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Literal, get_args

from evernear.errors import ConflictError, EvernearError, SlackError, StoreError
from evernear.frozen import Frozen
from evernear.settings import Settings

Part = Literal["store", "cluster", "pipelines", "slack"]
PARTS: tuple[Part, ...] = get_args(Part)
SLACK_SCOPES = frozenset(
    {"app_mentions:read", "chat:write", "chat:write.public", "commands", "files:write", "usergroups:read"}
)
"""What deploy/slack/manifest.yaml asks for."""
PIPELINE = "continuous-training"
PROBE = "doctor.json"


class Finding(Frozen):
    """What was found of one part."""

    part: Part
    well: bool
    message: str


def configured(settings: Settings) -> list[Part]:
    """The parts that ``settings`` and the environment speak of."""
    parts: list[Part] = ["store"]
    if settings.target == "kubernetes":
        parts.append("cluster")
    if settings.pipeline.endpoint or "KUBERNETES_SERVICE_HOST" in os.environ:
        parts.append("pipelines")
    if settings.slack.channel or any(name.startswith("SLACK_") for name in os.environ):
        parts.append("slack")
    return parts


def examine(settings: Settings, parts: Sequence[Part]) -> Iterator[Finding]:
    """What is found of ``parts``, as it is found; no error leaves this."""
    examinations: dict[Part, Callable[[Settings], str]] = {
        "store": _store,
        "cluster": _cluster,
        "pipelines": _pipelines,
        "slack": _slack,
    }
    for part in parts:
        try:
            message, well = examinations[part](settings), True
        except EvernearError as error:
            message, well = str(error), False
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            message, well = f"{package} is not installed; run `pip install 'evernear[pipeline,triggers]'`.", False
        yield Finding(part=part, well=well, message=message)


def _store(settings: Settings) -> str:
    """Write, read, list, and lose a compare-and-swap."""
    from evernear.release.registry import Registry
    from evernear.store import open_store

    store = open_store(settings.store_uri)
    before, data = store.find(PROBE), f'{{"looked": "{datetime.now(UTC).isoformat()}"}}'.encode()
    store.put_if(PROBE, data, before[1] if before else None)
    try:
        store.put_if(PROBE, b"{}", before[1] if before else None)
    except ConflictError:
        pass
    else:
        raise StoreError(f"{store.uri} lets a write through whose condition does not hold; use another object store.")
    registry = Registry(store)
    champion, releases = registry.champion(), sum(1 for _ in registry.list())
    serves = f"champion {champion.version}" if champion else "no champion yet"
    return f"{store.uri} can be read and written, conditionally too; {releases} releases, {serves}."


def _cluster(settings: Settings) -> str:
    """Ask the API server whether a deployment could work."""
    from evernear.deployment.kubernetes import KubernetesTarget

    target = KubernetesTarget(settings)
    target.require_deployable()
    cluster = target.cluster
    return (
        f"{cluster.host} would accept the objects of a release in namespace {cluster.namespace}, "
        "and allows a rollout to be followed, explained and rolled back."
    )


def _pipelines(settings: Settings) -> str:
    """Ask for the newest version of the pipeline."""
    from evernear.kubeflow.client import KfpRuns

    runs = KfpRuns(settings.pipeline)
    newest, started = runs.newest(PIPELINE), runs.list(limit=1)
    last = f"the last run is {started[0].state}" if started else "no run yet"
    return f"{runs.url} has {PIPELINE} {newest.display_name}, {last}."


def _slack(settings: Settings) -> str:
    """Use each token once, and look whether the app has its scopes."""
    from slack_sdk.web import WebClient

    from evernear.triggers.slack.client import translated_errors
    from evernear.triggers.slack.server import Secrets

    secrets = Secrets.of_environment(settings.slack)
    client = WebClient(secrets.bot_token, base_url=settings.slack.api_url)
    with translated_errors("auth.test"):
        told = client.auth_test()
    granted = {scope.strip() for scope in str(told.headers.get("x-oauth-scopes", "")).split(",")}
    if missing := ", ".join(sorted(SLACK_SCOPES - granted)):
        raise SlackError(f"The bot lacks the scopes {missing}; install the app again from deploy/slack/manifest.yaml.")
    if secrets.app_token:
        with translated_errors("apps.connections.open"):
            client.apps_connections_open(app_token=secrets.app_token)
    asks = "" if settings.slack.channel else " No slack.channel is set, so nobody is asked what the watcher proposes."
    return f"@{told['user']} of {told['team']} has its scopes and its connection.{asks}"
