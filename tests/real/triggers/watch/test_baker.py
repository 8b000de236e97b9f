"""The bake from end to end on a real store; the pods' counters and the pipeline server are in
memory."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from evernear.common.store import Store, open_store
from evernear.errors import ConflictError, PipelineServerError, StoreError
from evernear.kubeflow.runs import Run, State
from evernear.release.bake import BakeState, BakeStore, Breaches, Figures, PodCounters, total
from evernear.release.promotions import Cause
from evernear.release.registry import Registry
from evernear.settings import Settings
from evernear.triggers.requests import RequestStore
from evernear.triggers.watch import baker as baker_module
from evernear.triggers.watch.baker import BAKER, Baker, PodMetrics, addresses, parse_counters
from tests.real.serving.fake_servers import http_server
from tests.real.triggers.memory_runs import RunsInMemory
from tests.real.triggers.watch.watched import NOON, memory_runs
from tests.releases import PackedRelease

POLL = timedelta(seconds=10)
ADA = Cause(by="Ada", why="by hand")


@dataclass
class Cluster:
    """A store, the pods of its champion with their traffic, and a clock. A baker is made anew after
    a kill."""

    directory: Path
    releases: tuple[PackedRelease, ...]
    now: datetime = NOON
    runs: RunsInMemory | None = field(default_factory=lambda: memory_runs("store", "release", "reason", "started_by"))
    pods: dict[str, PodCounters] = field(default_factory=dict[str, PodCounters])
    unknown: dict[str, float] = field(default_factory=dict[str, float])
    requests: int = 50
    """Requests that each pod answers between two polls."""
    bake_s: int = 900

    def __post_init__(self) -> None:
        self.store: Store = open_store((self.directory / "store").as_uri())
        self.registry = Registry(self.store)
        self.baker = self.restarted()
        for release in self.releases:
            self.registry.publish(release.archive)

    def restarted(self) -> Baker:
        tree: dict[str, Any] = {"store": self.store.uri, "target": "kubernetes", "watch": {"bake_s": self.bake_s}}
        self.baker = Baker(Settings.model_validate(tree), self.store, self.runs, lambda: self.pods, lambda: self.now)
        return self.baker

    def promote(self, number: int, how: Any = "deploy", cause: Cause | None = None) -> str:
        """Make a release live on two new pods."""
        version = self.releases[number].version
        self.registry.set_champion(version, self.registry.champion(), how, cause)
        self._date()
        return self._roll_out()

    def roll_back(self, cause: Cause) -> str:
        champion = self.registry.champion()
        assert champion is not None
        self.registry.roll_back(champion, cause)
        self._date()
        return self._roll_out()

    def _roll_out(self) -> str:
        champion = self.registry.champion()
        assert champion is not None
        number = champion.promotion.number
        figures = Figures(answered=8, predictions=8)  # the stored queries of the start
        self.pods = {f"10.0.{number}.{pod}": PodCounters(version=champion.version, figures=figures) for pod in (1, 2)}
        return champion.version

    def _date(self) -> None:
        """Date the promotion by this clock."""
        champion = self.registry.champion()
        assert champion is not None
        pointer = champion.pointer.model_copy(update={"since": self.now})
        self.store.put_if("releases/champion.json", pointer.to_json(), champion.etag)

    def serve(self, polls: int) -> list[str]:
        """Let the pods answer, and the baker poll; the sentences it returns."""
        sentences: list[str] = []
        for _ in range(polls):
            self.now += POLL
            for address, pod in self.pods.items():
                unknown = round(self.unknown.get(pod.version, 0.04) * self.requests)
                more = Figures(answered=self.requests, predictions=self.requests, unknown=unknown)
                self.pods[address] = pod.model_copy(update={"figures": pod.figures + more})
            sentences.append(self.baker.poll())
        return list(filter(None, sentences))

    @property
    def run(self) -> Run:
        assert self.runs is not None
        (run,) = self.runs.runs
        return run


@pytest.fixture
def live_cluster(tmp_path: Path, releases: tuple[PackedRelease, ...]) -> Cluster:
    """The first release has been live for five minutes."""
    cluster = Cluster(tmp_path, releases)
    cluster.promote(0)
    cluster.serve(31)  # the first poll only notes the counters
    return cluster


def test_planted_rise_is_rolled_back_within_a_minute(live_cluster: Cluster) -> None:
    good, bad = live_cluster.releases[0].version, live_cluster.releases[1].version
    live_cluster.unknown[bad] = 0.24
    live_cluster.promote(1)
    began, rolled_back = live_cluster.serve(6)
    assert began == (
        f"The bake of release {bad} began, compared with 3,000 requests of the hour before; it ends at 12:20:10 UTC."
    )
    rule = "Rule unknown: 24.0% of 300 images are unknown, compared with 4.0% of 3,000 before the rollout."
    assert rolled_back == f"Release {bad} is rolled back to {good}. {rule}"
    assert live_cluster.run.pipeline == "rollback"
    assert live_cluster.run.parameters == {
        "store": live_cluster.store.uri,
        "release": bad,
        "reason": rule,
        "started_by": BAKER,
    }
    # Slack follows the request and posts the outcome of the run, with the reason.
    (request,) = RequestStore(live_cluster.store).list()
    assert (request.state, request.run, request.reasons, request.is_proposal) == (
        "started",
        live_cluster.run.id,
        (rule,),
        True,
    )
    # The run rolls back, and nothing else happens.
    live_cluster.roll_back(Cause(by=BAKER, why=rule, run=live_cluster.run.id))
    ended = f"Release {bad} was rolled back to {good} by {BAKER}. Release {good} is not baked: it was live before."
    assert live_cluster.serve(200) == [ended]
    assert len(live_cluster.runs.runs) == 1  # type: ignore[union-attr]


def test_equal_release_passes(live_cluster: Cluster) -> None:
    version = live_cluster.promote(1)
    _, passed = live_cluster.serve(91)
    assert passed == (
        f"Release {version} passed its bake: 0.0% errors and 4.0% unknown of 8,900 requests, compared with 0.0% errors "
        "and 4.0% unknown of 3,000 requests before."
    )
    state, _ = BakeStore(live_cluster.store).load()
    assert state is not None
    assert (state.last, state.bake) == (passed, None)
    assert live_cluster.serve(100) == []


@pytest.mark.parametrize(
    ("missing", "reason"),
    [("requests", "it got no requests"), ("pods", "no pod of it answered at its metrics port")],
)
def test_bake_that_counts_nothing_ends_without_a_verdict(live_cluster: Cluster, missing: str, reason: str) -> None:
    version = live_cluster.promote(1)
    if missing == "pods":
        live_cluster.pods = {}
    live_cluster.requests = 0
    assert live_cluster.serve(90)[-1] == f"The bake of release {version} ended without a verdict: {reason}."


def test_without_a_reference_only_errors_are_compared(tmp_path: Path, releases: tuple[PackedRelease, ...]) -> None:
    cluster = Cluster(tmp_path, releases)
    cluster.promote(0)
    cluster.serve(1)
    version = cluster.promote(1)
    cluster.unknown[version] = 0.9
    began, passed = cluster.serve(91)
    assert "compared with a fixed limit of errors" in began
    assert passed.startswith(f"Release {version} passed its bake, which compared errors alone: 0.0% errors and 90.0%")
    assert passed.endswith(
        f"No request of {releases[0].version} was counted, so its share of unknown and its latency are not known."
    )


def test_first_release_is_not_baked(tmp_path: Path, releases: tuple[PackedRelease, ...]) -> None:
    cluster = Cluster(tmp_path, releases)
    assert cluster.baker.poll() == ""  # nothing was promoted
    cluster.promote(0)
    assert cluster.serve(100) == []


@pytest.mark.parametrize("polls", [1, 2, 3, 4, 5])
def test_killed_baker_is_continued_by_the_next(live_cluster: Cluster, polls: int) -> None:
    """Pods keep their counters, so that the next process counts the requests of the time
    between."""
    live_cluster.unknown[live_cluster.releases[1].version] = 0.24
    live_cluster.promote(1)
    live_cluster.serve(polls)
    live_cluster.restarted()
    live_cluster.serve(9)
    assert live_cluster.run.parameters["release"] == live_cluster.releases[1].version


@pytest.mark.parametrize("step", ["add", "_request", "_start_rollback"])
def test_baker_killed_during_the_rollback_is_continued(
    live_cluster: Cluster, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> Any:
        raise KeyboardInterrupt

    live_cluster.unknown[live_cluster.releases[1].version] = 0.24
    live_cluster.promote(1)
    with monkeypatch.context() as patched:
        patched.setattr(Breaches if step == "add" else Baker, step, die)
        with pytest.raises(KeyboardInterrupt):
            live_cluster.serve(20)
    live_cluster.restarted()
    live_cluster.serve(1)
    assert live_cluster.run.parameters["release"] == live_cluster.releases[1].version
    assert Breaches(live_cluster.store).find(live_cluster.releases[1].version) is not None


def serve_until_breach(cluster: Cluster) -> None:
    """Deploy a release with 20 more points of unknown, until its rollback was requested."""
    cluster.unknown[cluster.releases[1].version] = 0.24
    cluster.promote(1)
    while not list(RequestStore(cluster.store).list()):
        cluster.serve(1)


def test_rollback_is_started_once_although_the_response_is_lost(live_cluster: Cluster) -> None:
    assert live_cluster.runs
    live_cluster.runs.lost_answers = 1
    with pytest.raises(PipelineServerError):
        serve_until_breach(live_cluster)
    live_cluster.serve(5)
    assert len(live_cluster.runs.runs) == 1


def test_failed_rollback_is_started_again_later(live_cluster: Cluster) -> None:
    assert live_cluster.runs
    serve_until_breach(live_cluster)
    live_cluster.runs.end(live_cluster.run.id, State.FAILED)
    live_cluster.serve(2)
    assert len(live_cluster.runs.runs) == 1
    live_cluster.serve(1)
    assert [run.state for run in reversed(live_cluster.runs.runs)] == [State.RUNNING, State.FAILED]
    live_cluster.runs.end(live_cluster.runs.runs[1].id, State.CANCELED)  # a person stopped it
    live_cluster.serve(100)
    assert len(live_cluster.runs.runs) == 2


def test_rollback_of_a_person_ends_the_bake(live_cluster: Cluster) -> None:
    version = live_cluster.promote(1)
    live_cluster.serve(10)
    good = live_cluster.roll_back(ADA)
    assert live_cluster.serve(100) == [
        f"The bake of release {version} ended without a verdict: Ada moved the champion. "
        f"Release {good} is not baked: it was live before."
    ]


def test_second_deployment_is_compared_with_the_last_release_that_passed(live_cluster: Cluster) -> None:
    """The release in between has not completed its bake:
    both could have the same fault."""
    for number in (1, 2):
        live_cluster.unknown[live_cluster.releases[number].version] = 0.24
    live_cluster.promote(1)
    live_cluster.serve(2)
    version = live_cluster.promote(2)
    began, rolled_back = live_cluster.serve(10)
    assert began.startswith(f"The bake of release {live_cluster.releases[1].version} ended without a verdict")
    assert f"The bake of release {version} began, compared with 3,000 requests" in began
    assert rolled_back.startswith(
        f"Release {version} is rolled back to {live_cluster.releases[1].version}. Rule unknown"
    )


def test_restarted_and_added_pods_count_from_their_first_poll(live_cluster: Cluster) -> None:
    version = live_cluster.promote(1)
    live_cluster.serve(5)
    restarted, _ = live_cluster.pods
    live_cluster.pods[restarted] = PodCounters(version=version, figures=Figures(answered=8, predictions=8))
    live_cluster.pods["10.0.9.9"] = PodCounters(
        version=version, figures=Figures(answered=9000, predictions=9000, unknown=9000)
    )
    passed = live_cluster.serve(86)[-1]
    assert "0.0% errors and 4.0% unknown" in passed


def test_pods_of_the_release_before_do_not_count_in_a_rolling_update(live_cluster: Cluster) -> None:
    old = dict(live_cluster.pods)
    live_cluster.unknown[live_cluster.releases[0].version] = 0.04
    version = live_cluster.promote(1)
    live_cluster.unknown[version] = 0.24
    live_cluster.pods |= old
    _, rolled_back = live_cluster.serve(6)
    assert "24.0% of 300 images are unknown, compared with 4.0% of 3,000" in rolled_back


def test_applied_settings_do_not_end_the_bake(live_cluster: Cluster) -> None:
    version = live_cluster.promote(1)
    live_cluster.serve(5)
    champion = live_cluster.registry.champion()
    assert champion is not None
    live_cluster.registry.record_settings(champion, ADA)
    assert live_cluster.serve(86)[-1].startswith(f"Release {version} passed its bake")


def test_watcher_that_starts_too_late_says_so(live_cluster: Cluster) -> None:
    version = live_cluster.promote(1)
    live_cluster.now += timedelta(hours=2)
    assert live_cluster.serve(5) == [f"Release {version} was not baked: no watcher ran in time after its rollout."]


def test_release_is_not_deployed_again_without_a_person(live_cluster: Cluster) -> None:
    bad = live_cluster.releases[1]
    live_cluster.unknown[bad.version] = 0.24
    live_cluster.promote(1)
    live_cluster.serve(6)
    live_cluster.roll_back(Cause(by=BAKER))
    live_cluster.serve(1)
    breaches = Breaches(live_cluster.store)
    with pytest.raises(
        ConflictError, match=rf"Release {bad.version} is not deployed. It was rolled back .*: Rule unknown"
    ):
        breaches.require_none(bad.manifest)
    # Another run with the same network and index makes the same release under another version.
    with pytest.raises(ConflictError, match=rf"Release {bad.version}, which is the same one, was rolled back"):
        breaches.require_none(live_cluster.releases[2].manifest)
    breaches.overrule(bad.version, ADA)
    breaches.require_none(bad.manifest)
    live_cluster.promote(1, "promote", ADA)
    expected = f"Release {bad.version} is not baked: Ada promoted it after a bake had rolled it back."
    assert live_cluster.serve(100) == [expected]


def test_two_watchers_count_no_request_twice(live_cluster: Cluster) -> None:
    first, second = live_cluster.baker, live_cluster.restarted()
    live_cluster.promote(1)
    conflicts = 0
    for _ in range(100):
        live_cluster.now += POLL
        for baker in (first, second):
            try:
                baker.poll()
            except ConflictError:
                conflicts += 1
    assert conflicts
    state, _ = BakeStore(live_cluster.store).load()
    assert state is not None
    assert state.last.endswith("it got no requests.")


def test_store_failure_leaves_the_bake_as_it_was(live_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    live_cluster.unknown[live_cluster.releases[1].version] = 0.24
    live_cluster.promote(1)
    live_cluster.serve(5)

    def fail(*_: Any) -> Any:
        raise StoreError("The store is down.")

    with monkeypatch.context() as patched:
        patched.setattr(Registry, "champion", fail)
        for _ in range(3):
            with pytest.raises(StoreError):
                live_cluster.serve(1)
    live_cluster.serve(1)
    assert live_cluster.run.parameters["release"] == live_cluster.releases[1].version


def test_reference_is_the_last_hour(live_cluster: Cluster) -> None:
    """The mix of images changes in the course of a day."""
    version = live_cluster.releases[0].version
    state, figures = BakeState(version=version, number=1), Figures()
    for minute in range(180):
        of_minute = Figures(answered=100, predictions=100, unknown=90 if minute < 119 else 4)
        figures += of_minute
        pods = {"10.0.0.1": PodCounters(version=version, figures=figures)}
        state = state.observe(pods, NOON + timedelta(minutes=minute))
    before = total(state.answered_by(version, NOON + timedelta(minutes=179)))
    assert len(state.recent) == 61
    assert (before.requests, before.unknown) == (6100, 244)


METRICS = """
# TYPE evernear_requests_total counter
evernear_requests_total{version="20270301.120000.aaaaaaaa",outcome="ok",Hostname="pod",} 40.0
evernear_requests_total{version="20270301.120000.aaaaaaaa",outcome="BadImage",Hostname="pod",} 3.0
evernear_requests_total{version="20270301.120000.aaaaaaaa",outcome="Overloaded",Hostname="pod",} 2.0
evernear_predictions_total{version="20270301.120000.aaaaaaaa",unknown="true",Hostname="pod",} 4.0
evernear_predictions_total{version="20270301.120000.aaaaaaaa",unknown="false",Hostname="pod",} 36.0
evernear_request_seconds_bucket{le="0.005",} 30.0
evernear_request_seconds_bucket{le="+Inf",} 40.0
evernear_request_seconds_count 40.0
evernear_release_info{version="20270301.120000.aaaaaaaa",network="0123456789ab",Hostname="pod",} 1.0
Requests5XX{Level="Host",Hostname="pod",} 5.0
"""
COUNTED = Figures(answered=45, refused=2, failed=5, predictions=40, unknown=4, timed=40, within={0.005: 30})


def test_metrics_of_pods_are_read() -> None:
    def answer(handler: Any, text: str = METRICS, status: int = 200) -> None:
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(text.encode())

    with (
        http_server(do_GET=answer) as good,
        http_server(do_GET=lambda handler: answer(handler, "no metrics {")) as garbled,
        http_server(do_GET=lambda handler: answer(handler, status=503)) as unready,
    ):
        ports = (good, garbled, unready, 1)
        read = PodMetrics(lambda: [("127.0.0.1", port) for port in ports])()
    assert read == {f"127.0.0.1:{good}": PodCounters(version="20270301.120000.aaaaaaaa", figures=COUNTED)}
    assert PodMetrics(list[tuple[str, int]])() == {}


def test_pod_of_no_release_or_of_several_is_left_out() -> None:
    assert parse_counters("") is None
    assert parse_counters(METRICS + 'evernear_release_info{version="b",network="c"} 1.0\n') is None


def test_names_are_resolved_to_all_addresses() -> None:
    assert ("127.0.0.1", 8082) in addresses("localhost", 8082)
    assert addresses("evernear-serving-pods.invalid", 8082) == []


def test_without_a_pipeline_server_this_process_rolls_back(
    live_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from evernear import deployment

    calls: list[tuple[str, str]] = []

    def roll_back(settings: Settings, *, cause: Cause, expected: str) -> None:
        calls.append((expected, cause.why))
        raise StoreError("The cluster is down.")

    monkeypatch.setattr(deployment, "roll_back", roll_back)
    live_cluster.runs = None
    live_cluster.restarted()
    bad = live_cluster.releases[1].version
    live_cluster.unknown[bad] = 0.24
    live_cluster.promote(1)
    with pytest.raises(StoreError):
        live_cluster.serve(10)
    ((expected, why),) = calls
    assert expected == bad
    assert why.startswith("Rule unknown")
    live_cluster.serve(int(baker_module.FIRST_RETRY_S / POLL.total_seconds()) - 1)  # waits before the next attempt
    with pytest.raises(StoreError):
        live_cluster.serve(1)
