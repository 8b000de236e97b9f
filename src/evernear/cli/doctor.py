"""``evernear doctor``: check the services that evernear depends on.

The checks send real requests with this process's settings and identity, and change only small
objects in the store, ``doctor.json``.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import typer

from evernear.cli.options import JsonOption, options_of, settings_anywhere
from evernear.common.extras import missing_library
from evernear.common.frozen import Frozen, require_format, stamp
from evernear.common.output import print_json, print_line, quantity
from evernear.errors import EvernearError, FormatError, SettingsError, SlackError, StoreError
from evernear.settings import Settings

if TYPE_CHECKING:
    from evernear.common.store import Store
    from evernear.common.store.roles import Role

Part = Literal["store", "cluster", "pipelines", "slack"]
PARTS: tuple[Part, ...] = get_args(Part)
SLACK_SCOPES = frozenset(
    {"app_mentions:read", "chat:write", "chat:write.public", "commands", "files:write", "usergroups:read"}
)
"""Those that deploy/slack/manifest.yaml requests."""
PIPELINE = "continuous-training"
PROBE = "doctor.json"


class CheckResult(Frozen):
    part: Part
    ok: bool
    message: str


@options_of(settings_anywhere)
def doctor(
    settings: Settings,
    parts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PART]...", help="store, cluster, pipelines or slack. [the configured ones]"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check the object store, the cluster, Kubeflow Pipelines and Slack. Report each problem with
    its remedy."""
    for part in parts or ():
        if part not in PARTS:
            raise SettingsError(f"Unknown part {part!r}; known: {', '.join(PARTS)}.")
    failed = False
    for finding in check(settings, cast("list[Part]", parts) or configured(settings)):
        failed = failed or not finding.ok
        if as_json:
            print_json(finding)
        else:
            print_line(f"{'ok  ' if finding.ok else 'FAIL'} {finding.part:<10} {finding.message}")
    if failed:
        raise typer.Exit(1)


def configured(settings: Settings) -> list[Part]:
    """The parts that ``settings`` or the environment configures."""
    parts: list[Part] = ["store"]
    if settings.target == "kubernetes":
        parts.append("cluster")
    if settings.pipeline.endpoint or "KUBERNETES_SERVICE_HOST" in os.environ:
        parts.append("pipelines")
    if settings.slack.channel or any(name.startswith("SLACK_") for name in os.environ):
        parts.append("slack")
    return parts


def check(settings: Settings, parts: Sequence[Part]) -> Iterator[CheckResult]:
    """Yield each result as soon as it is known. An error becomes a finding, except a `FormatError`,
    which concerns the whole store."""
    checks: dict[Part, Callable[[Settings], str]] = {
        "store": _store,
        "cluster": _cluster,
        "pipelines": _pipelines,
        "slack": _slack,
    }
    for part in parts:
        try:
            message, ok = checks[part](settings), True
        except FormatError:
            raise
        except EvernearError as error:
            message, ok = str(error), False
        except ModuleNotFoundError as error:
            message, ok = str(missing_library(error) or error), False
        yield CheckResult(part=part, ok=ok, message=message)


def _store(settings: Settings) -> str:
    """Do what the steps of a pipeline do, or else what the watcher or a server does. The first
    conditional write tests the store's support for them."""
    from evernear.common.store.current import current_store
    from evernear.common.store.roles import PIPELINE, READER, WATCH
    from evernear.release.registry import Registry

    store = current_store(settings.store_uri)
    refusal: StoreError | None = None
    for role in (PIPELINE, WATCH, READER):
        try:
            _act_as(role, store)
            break
        except StoreError as error:
            if not error.is_denied:
                raise
            refusal = refusal or error
    else:
        raise refusal or StoreError(f"{store.uri} allows nothing.")
    registry = Registry(store)
    champion, releases = registry.champion(), sum(1 for _ in registry.list())
    current = f"champion {champion.version}" if champion else "no champion yet"
    allowed = "reads, writes and conditional writes"
    if refusal is not None:
        commands = " and ".join(f"`{command}`" for command in role.commands)
        allowed = f"{commands}, but no pipeline steps ({str(refusal).rstrip('.')})"
    keys = f" It uses the keys of {store.identity}." if store.identity else ""
    return f"{store.uri} allows {allowed}; {quantity(releases, 'release')}, {current}.{keys}"


def _act_as(role: "Role", store: "Store") -> None:
    """Raises `StoreError` if these keys may not do what ``role`` does."""
    for prefix in role.reads:
        store.find(f"{prefix}{PROBE}")
        next(iter(store.list(prefix or "releases/")), None)
    for prefix in filter(_is_own, role.writes):
        key = f"{prefix}{PROBE}"
        if before := store.find(key):
            require_format(before[0], f"{store.uri}/{key}")
        data = json.dumps(stamp() | {"checked": datetime.now(UTC).isoformat()}).encode()
        store.put_if(key, data, before[1] if before else None)
    for prefix in filter(_is_own, role.deletes):
        store.delete(f"{prefix}{PROBE}")


def _is_own(prefix: str) -> bool:
    """Whether keys may have this prefix, unlike that of the store's own test objects."""
    return not prefix.startswith(".")


def _cluster(settings: Settings) -> str:
    """Check the deployer's permissions, and a release's objects with a dry run."""
    from evernear.deployment.kubernetes import KubernetesTarget

    target = KubernetesTarget(settings)
    target.require_deployable()
    cluster = target.cluster
    return (
        f"{cluster.host} accepts the objects of a release in namespace {cluster.namespace} (dry run), and grants the "
        "rights to watch, diagnose and undo a rollout."
    )


def _pipelines(settings: Settings) -> str:
    """Get the pipeline's newest version, and the last run."""
    from evernear.kubeflow.client import KfpRuns

    runs = KfpRuns(settings.pipeline)
    newest, recent = runs.newest(PIPELINE), runs.list(limit=1)
    last = f"the last run is {recent[0].state}" if recent else "no run yet"
    return f"{runs.url} has {PIPELINE} {newest.display_name}, {last}."


def _slack(settings: Settings) -> str:
    """Use each token once, and check the app's scopes."""
    from evernear.triggers.slack.client import SlackClient
    from evernear.triggers.slack.server import read_secrets

    bot_token, secret = read_secrets(settings.slack)
    client = SlackClient(bot_token, settings.slack.api_url, retries=False)
    identity = client.auth_test()
    granted = {scope.strip() for scope in str(identity.headers.get("x-oauth-scopes", "")).split(",")}
    if missing := ", ".join(sorted(SLACK_SCOPES - granted)):
        raise SlackError(f"The bot lacks the scopes {missing}; install the app again from deploy/slack/manifest.yaml.")
    if settings.slack.mode == "socket":
        client.apps_connections_open(app_token=secret)
    warning = "" if settings.slack.channel else " slack.channel is not set, so the watcher's proposals are not posted."
    return f"@{identity['user']} of {identity['team']} is connected and has its scopes.{warning}"
