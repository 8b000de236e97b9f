"""After a rollout, the bake compares the new release with the previous release, and rolls back if
the new release is worse.

The watcher runs the bake, because the watcher outlives the deploy step. All promotions are baked in
the same way, whether a run, a command or a button made them. No process waits for the end of a
bake. If the watcher is killed, a new process continues the bake. The watcher only reads the pods'
metrics. The ``rollback`` pipeline performs rollbacks, so the watcher needs no permissions in the
cluster.
"""

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import urllib3
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from evernear.common.audit import request_id
from evernear.common.output import quantity
from evernear.common.retry import backoff_s
from evernear.common.store import Store
from evernear.errors import ConflictError
from evernear.kubeflow.runs import State, from_settings, to_start
from evernear.release.bake import (
    Bake,
    BakeState,
    BakeStore,
    Breach,
    Breaches,
    Comparison,
    Figures,
    PodCounters,
    Share,
    total,
)
from evernear.release.promotions import Cause, Champion, Promotion
from evernear.release.registry import Registry
from evernear.serving.endpoints import host_and_port
from evernear.settings import Settings
from evernear.triggers.requests import POLICY, WATCHER, Request, RequestStore

if TYPE_CHECKING:
    from evernear.kubeflow.client import KfpRuns

Address = tuple[str, int]
TIMEOUT_S = 3.0
MAX_BYTES = 2**22
REFUSALS = ("Overloaded", "GalleryUnavailable")
"""The outcomes in `evernear.serving.core` that have a status of 500 or more."""
PODS_SERVICE_SUFFIX = "-pods"
"""Suffix of the pods' headless Service in ``deploy/base/prep.yaml``. The Service is named after the
Deployment."""
BAKER = "the watcher's bake"
SAVE_INTERVAL = timedelta(minutes=1)
"""Time between two saves of the counter values. If the process is killed, at most the requests
since the last save are lost."""
BAKE_INTERVAL_S = 10.0
"""Time between two polls. A rollback begins within seconds of a breach."""
FIRST_RETRY_S, LAST_RETRY_S = 30.0, 600.0


class Baker:
    """Bakes the releases of one store. ``read_pods`` returns the counter values of each pod, keyed
    by the pod's address."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        runs: "KfpRuns | None",
        read_pods: Callable[[], dict[str, PodCounters]],
        clock: Callable[[], datetime],
    ) -> None:
        self._settings = settings
        self._store = store
        self._runs = runs
        self._read_pods = read_pods
        self._clock = clock
        self._registry = Registry(store)
        self._states = BakeStore(store)
        self._breaches = Breaches(store)
        self._requests = RequestStore(store)
        self._state: BakeState | None = None
        self._etag: str | None = None
        self._saved = self._retry_at = datetime.min.replace(tzinfo=UTC)
        self._attempts = 0

    def poll(self) -> str:
        """Read the pods' metrics once and advance the bake.

        Returns a sentence if a bake began or ended, otherwise an empty string.

        Raises:
            EvernearError: the store or the pipeline server is unavailable,
                or the rollback failed. Poll again.
        """
        champion, now = self._registry.champion(), self._clock()
        if champion is None:
            return ""
        if self._state is None:
            self._state, self._etag = self._states.load()
        state = self._state or BakeState(version=champion.version, number=champion.promotion.number)
        state = state.observe(self._read_pods(), now)
        moved = judged = ""
        if champion.promotion.number != state.number:
            state, moved = self._follow(state, champion, now)
        if state.bake is not None and not state.bake.breach:
            state, judged = self._judge(state, state.bake, now)
        self._state = state
        if moved or judged or not timedelta(0) <= now - self._saved < SAVE_INTERVAL:
            self._save(state, now)
        if state.bake is not None and state.bake.breach:
            self._undo(state.bake, now)
        return f"{moved} {judged}".strip()

    def _follow(self, state: BakeState, champion: Champion, now: datetime) -> tuple[BakeState, str]:
        """The state after the champion pointer moved. The bake in progress ends, and a new bake may
        begin."""
        promotion, bake = champion.promotion, state.bake
        moved = {"version": promotion.version, "number": promotion.number}
        if promotion.version == state.version and promotion.how in ("apply", "anchor"):  # the same release
            bake = bake and bake.model_copy(update={"number": promotion.number})
            return state.model_copy(update=moved | {"bake": bake}), ""
        self._attempts, self._retry_at = 0, now
        ended = f"{_interrupted(bake, promotion)} " if bake else ""
        new, sentence = self._begin(state, promotion, now)
        return state.model_copy(update=moved | {"bake": new, "last": ended + sentence}), ended + sentence

    def _begin(self, state: BakeState, promotion: Promotion, now: datetime) -> tuple[Bake | None, str]:
        """Return a bake of the champion and a sentence about the bake, or None and the reason why
        the champion is not baked."""
        version, previous, since = promotion.version, promotion.previous, min(promotion.since, now)
        ends = since + timedelta(seconds=self._settings.watch.bake_s)
        if promotion.how in ("rollback", "restore"):
            return None, f"Release {version} is not baked: it was live before."
        if previous is None:
            return None, f"Release {version} is not baked: it replaces no release."
        if self._breaches.find(version) is not None:
            return None, f"Release {version} is not baked: {promotion.by} promoted it after a bake had rolled it back."
        if ends <= now:
            return None, f"Release {version} was not baked: no watcher ran in time after its rollout."
        # A release that did not complete its bake is not used as a reference.
        before = state.bake.before if state.bake else state.answered_by(previous, since)
        count = total(before).requests
        reference = f"{quantity(count, 'request')} of the hour before" if count else "a fixed limit of errors"
        bake = Bake(version=version, number=promotion.number, previous=previous, ends=ends, before=before)
        return bake, f"The bake of release {version} began, compared with {reference}; it ends at {ends:%H:%M:%S} UTC."

    def _judge(self, state: BakeState, bake: Bake, now: datetime) -> tuple[BakeState, str]:
        """The state after a comparison, and a sentence if the comparison ends the bake."""
        breach = Comparison(bake.before).find_breach(bake.seen)
        if breach is not None:
            sentence = f"Release {bake.version} is rolled back to {bake.previous}. {breach}"
            bake = bake.model_copy(update={"breach": breach})
            return state.model_copy(update={"bake": bake, "last": sentence}), sentence
        if now < bake.ends:
            return state, ""
        is_reached = any(pod.version == bake.version for pod in state.pods.values())
        sentence = _result(bake, is_reached)
        return state.model_copy(update={"bake": None, "last": sentence}), sentence

    def _undo(self, bake: Bake, now: datetime) -> None:
        """Roll back. Each step can be repeated, so that the next process can complete the rollback
        if this process is killed."""
        manifest = self._registry.get(bake.version, include_pruned=True).manifest
        self._breaches.add(Breach.of(manifest, bake.breach, now))
        if self._runs is not None:
            self._start_rollback(bake, self._runs, now)
        elif now >= self._retry_at:
            from evernear.deployment import roll_back

            self._retry_at = now + _wait(self._attempts)
            self._attempts += 1
            roll_back(self._settings, cause=Cause(by=BAKER, why=bake.breach), expected=bake.version)

    def _start_rollback(self, bake: Bake, runs: "KfpRuns", now: datetime) -> None:
        """Start the ``rollback`` pipeline. If the pipeline run fails, start the pipeline again.
        Slack follows the request."""
        request = self._requests.find(request_id("bake", bake.version, bake.number)) or self._request(bake, now)
        if request.state == "started" and runs.show(request.run).state is State.FAILED:
            request = self._requests.change(request, state="failed")
        if request.state == "failed" and now >= (request.answered or request.created) + _wait(request.attempt):
            again = {"attempt": request.attempt + 1, "answered": now, "run": "", "progress": "", "verdict": ""}
            request = self._requests.change(request, state="accepted", **again)
        if request.state == "accepted":
            known = runs.parameters("rollback")
            ours = from_settings(self._settings, known)
            arguments = to_start("rollback", known, BAKER, ours, request.parameters)
            run = runs.start("rollback", arguments, request.key, self._store)
            self._requests.change(request, state="started", run=run.id)

    def _request(self, bake: Bake, now: datetime) -> Request:
        request = Request(
            id=request_id("bake", bake.version, bake.number),
            kind="roll_back",
            created=now,
            asked_by=WATCHER,
            answered_by=POLICY,
            answered=now,
            pipeline="rollback",
            parameters={"release": bake.version, "reason": bake.breach},
            reasons=(bake.breach,),
            release=bake.version,
            move=bake.number,
        )
        self._requests.add(request)
        return request

    def _save(self, state: BakeState, now: datetime) -> None:
        try:
            self._etag = self._states.save(state, self._etag)
        except ConflictError:  # another watcher, or an earlier write whose response was lost
            self._state = None
            raise
        self._saved = now


def _wait(attempts: int) -> timedelta:
    """Time from a failed rollback to the next attempt."""
    return timedelta(seconds=backoff_s(attempts + 1, FIRST_RETRY_S, LAST_RETRY_S))


def _interrupted(bake: Bake, promotion: Promotion) -> str:
    if bake.breach and promotion.how == "rollback":
        return f"Release {bake.version} was rolled back to {promotion.version} by {promotion.by}."
    if bake.breach:
        return f"The rollback of release {bake.version} ended: {promotion.by} moved the champion."
    return f"The bake of release {bake.version} ended without a verdict: {promotion.by} moved the champion."


def _result(bake: Bake, is_reached: bool) -> str:
    """A sentence that describes the end of a bake without a breach.

    ``is_reached`` says whether a pod of the release reported metrics.
    """
    seen, before = total(bake.seen), total(bake.before)
    if not seen.requests:
        reason = "it got no requests" if is_reached else "no pod of it answered at its metrics port"
        return f"The bake of release {bake.version} ended without a verdict: {reason}."
    if not before.requests:
        return (
            f"Release {bake.version} passed its bake, which compared errors alone: {_shares(seen)}. No request of "
            f"{bake.previous} was counted, so its share of unknown and its latency are not known."
        )
    return f"Release {bake.version} passed its bake: {_shares(seen)}, compared with {_shares(before)} before."


def _shares(figures: Figures) -> str:
    errors, unknown = Share(figures.errors, figures.requests), Share(figures.unknown, figures.predictions)
    waited = f", 99% answered within {figures.p99_s:g} s" if figures.p99_s else ""
    return f"{errors} errors and {unknown} unknown of {quantity(figures.requests, 'request')}{waited}"


def addresses(host: str, port: int) -> list[Address]:
    """The addresses of the ready pods of a headless Service. Empty without ready pods."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({(str(entry[4][0]), port) for entry in found})


class PodMetrics:
    """Reads the metrics of the pods that ``find`` returns. A pod that does not respond in time is
    left out."""

    def __init__(self, find: Callable[[], Sequence[Address]]) -> None:
        self._find = find
        self._http = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(total=TIMEOUT_S))

    def __call__(self) -> dict[str, PodCounters]:
        """The counter values of each pod, keyed by address."""
        pods = [host_and_port(*address) for address in self._find()]
        if not pods:
            return {}
        with ThreadPoolExecutor(min(8, len(pods)), "pod-metrics") as threads:
            counters = threads.map(self._read, pods)
            return {pod: read for pod, read in zip(pods, counters, strict=True) if read is not None}

    def _read(self, pod: str) -> PodCounters | None:
        try:
            response = self._http.request("GET", f"http://{pod}/metrics", preload_content=False)
            try:
                text = response.read(MAX_BYTES).decode()
            finally:
                response.release_conn()
            return parse_counters(text) if response.status == 200 else None
        except (urllib3.exceptions.HTTPError, ValueError):
            return None


def parse_counters(text: str) -> PodCounters | None:
    """The counter values in a TorchServe response, or None if the response does not contain exactly
    one release.

    Raises:
        ValueError: the text is not in Prometheus text format.
    """
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    versions = {sample.labels["version"] for sample in samples if sample.name == "evernear_release_info"}
    if len(versions) != 1:
        return None

    def count(name: str, accept: Callable[[Sample], bool] = lambda _: True) -> int:
        return round(sum(sample.value for sample in samples if sample.name == name and accept(sample)))

    bounds = [sample for sample in samples if sample.name == "evernear_request_seconds_bucket"]
    figures = Figures(
        answered=count("evernear_requests_total"),
        refused=count("evernear_requests_total", lambda sample: sample.labels["outcome"] in REFUSALS),
        failed=count("Requests5XX"),
        predictions=count("evernear_predictions_total"),
        unknown=count("evernear_predictions_total", lambda sample: sample.labels["unknown"] == "true"),
        timed=count("evernear_request_seconds_count"),
        within={float(sample.labels["le"]): round(sample.value) for sample in bounds if sample.labels["le"] != "+Inf"},
    )
    return PodCounters(version=versions.pop(), figures=figures)
