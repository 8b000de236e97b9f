"""The process: schedule, bucket notifications, failures, pause, health probe, end."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from evernear.cli.triggers import baker_of
from evernear.common.run_record import RunRecord, StepRecord
from evernear.common.store import open_store
from evernear.data.ingest import ingest_source
from evernear.data.manifest import manifest_key
from evernear.errors import EvernearError, ServingError, StoreError
from evernear.settings import Settings
from evernear.triggers.requests import RequestStore
from evernear.triggers.watch import service as service_module
from evernear.triggers.watch.baker import Baker
from evernear.triggers.watch.metrics import exposition
from evernear.triggers.watch.schedule_state import CheckReport, ScheduleStore
from evernear.triggers.watch.service import WatchService
from evernear.triggers.watch.watcher import Watcher
from tests.real.triggers.watch.notifying_minio import KEYS, notifying_minio
from tests.real.triggers.watch.watched import noise
from tests.releases import settings_on_free_ports


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A source without a release: every check decides to train."""
    monkeypatch.setattr(service_module, "DEBOUNCE_S", 0.3)
    for number in range(30):
        path = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(noise(number))
    return make_settings(tmp_path)


def make_settings(directory: Path, **watch: object) -> Settings:
    chosen: dict[str, object] = {"interval_s": 3600, "health_port": 0, **watch}
    return Settings.model_validate(
        {
            "workdir": directory / "work",
            "store": (directory / "store").as_uri(),
            "data": {"source": f"folder:{directory / 'images'}"},
            "watch": chosen,
        }
    )


class CountedWatcher(Watcher):
    """A watcher that records the times of its checks."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        super().__init__(settings, open_store(settings.store_uri), None, directory)
        self.checks_s: list[float] = []

    def check(self, act: bool = True) -> CheckReport:
        self.checks_s.append(time.monotonic())
        return super().check(act)


@contextmanager
def running(settings: Settings, directory: Path) -> Generator[tuple[WatchService, CountedWatcher]]:
    watcher = CountedWatcher(settings, directory)
    service = WatchService(watcher, settings)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        yield service, watcher
    finally:
        service.stopping.set()
        thread.join(timeout=20)
        assert not thread.is_alive()


def await_(condition: Callable[[], object]) -> None:
    """Wait as long as a test may take, because a busy machine checks slowly."""
    while not condition():
        time.sleep(0.02)


def test_first_check_is_immediate_and_the_next_on_the_schedule(settings: Settings, tmp_path: Path) -> None:
    with running(make_settings(tmp_path, interval_s=1), tmp_path) as (_, watcher):
        await_(lambda: len(watcher.checks_s) >= 3)
        assert watcher.checks_s[2] - watcher.checks_s[1] > 0.7
    assert len(list(RequestStore(open_store(settings.store_uri)).list())) == 1


def test_clock_that_is_set_back_does_not_end_the_schedule(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check before was at a time in the future, and the next one is an interval after it."""
    monkeypatch.setattr(service_module, "CLOCK_CHECK_S", 0.05)
    with running(make_settings(tmp_path, interval_s=1), tmp_path) as (service, watcher):
        await_(lambda: watcher.checks_s)
        service._scheduler.get_job("check").modify(next_run_time=datetime.now(UTC) + timedelta(days=3650))
        before = len(watcher.checks_s)
        await_(lambda: len(watcher.checks_s) > before)


def test_watcher_prunes_the_store_as_the_setting_says(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The older of two snapshots is garbage. During a run nothing is deleted, and the watcher tries
    again later."""
    store, images = open_store(settings.store_uri), settings.data
    first = manifest_key("images", ingest_source(images, store.uri).digest)
    (tmp_path / "images" / "a" / "more.png").write_bytes(noise(30))
    second = manifest_key("images", ingest_source(images, store.uri).digest)
    with running(settings, tmp_path) as (service, watcher):
        await_(lambda: watcher.checks_s)
        assert service._scheduler.get_job("prune") is None
    assert store.find(first)

    step = StepRecord(step="train", state="running", started=datetime.now(UTC), host="elsewhere/1")
    RunRecord(store, "busy").save_step(step)
    with running(make_settings(tmp_path, prune_keep=1), tmp_path) as (service, _):
        await_(lambda: "Run busy is in progress" in capsys.readouterr().out)
        assert store.find(first)
        await_(lambda: timedelta(0) < until(service, "prune") <= timedelta(hours=1))

        end = {"step": "notify", "state": "finished", "started": datetime.now(UTC)}
        RunRecord(store, "busy").save_step(step.model_copy(update=end))
        service._scheduler.get_job("prune").modify(next_run_time=datetime.now(UTC))
        await_(lambda: store.find(first) is None)
        await_(lambda: "Pruned the store: deleted " in capsys.readouterr().out)
        await_(lambda: timedelta(hours=23) < until(service, "prune") <= timedelta(days=1))
    assert store.find(second)


def until(service: WatchService, job: str) -> timedelta:
    """The time until the next run of a job."""
    return service._scheduler.get_job(job).next_run_time - datetime.now(UTC)


def test_burst_of_changes_leads_to_one_check(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS[1])
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with notifying_minio() as minio:
        monkeypatch.setenv("AWS_ENDPOINT_URL", minio.url)
        monkeypatch.setattr(service_module, "DEBOUNCE_S", 60.0)  # no check begins during the burst
        bucket = make_settings(tmp_path)
        bucket = bucket.model_copy(update={"data": bucket.data.model_copy(update={"source": "s3://images"})})
        # This server cannot list the source, which a check reports as a fault.
        with running(bucket, tmp_path) as (service, watcher):
            await_(lambda: minio.streams and watcher.checks_s)
            await_(lambda: until(service, "check") < timedelta(seconds=60))  # after the check, for the new stream
            before = len(watcher.checks_s)
            for number in range(40):
                due = service._scheduler.get_job("check").next_run_time
                minio.notify(f"7/{number}.png")
                await_(lambda due=due: service._scheduler.get_job("check").next_run_time > due)
            assert until(service, "check") <= timedelta(seconds=60)
            assert len(watcher.checks_s) == before, "each change delays the check"
            failures = service._failures
            service._scheduler.get_job("check").modify(next_run_time=datetime.now(UTC))
            await_(lambda: service._failures > failures)
            assert len(watcher.checks_s) == before + 1
            assert until(service, "check") > timedelta(seconds=20), "no other check is due"
            minio.end_streams()


def test_endless_changes_delay_a_check_by_a_limit(settings: Settings, tmp_path: Path) -> None:
    with running(settings, tmp_path) as (service, watcher):
        await_(lambda: watcher.checks_s)
        begin_s = time.monotonic()
        while len(watcher.checks_s) < 2:
            service.changed()
            time.sleep(0.02)
            assert time.monotonic() - begin_s < 15
        assert watcher.checks_s[1] - begin_s > 2  # 10 times DEBOUNCE_S


def test_change_during_a_check_leads_to_another(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    plain = Watcher.check

    def slow(self: Watcher, act: bool = True) -> CheckReport:
        entered.set()
        go_on.wait(20)
        return plain(self, act)

    monkeypatch.setattr(Watcher, "check", slow)
    with running(settings, tmp_path) as (service, watcher):
        assert entered.wait(20)
        service.changed()
        time.sleep(0.5)  # the check coincides with the active one
        go_on.set()
        await_(lambda: len(watcher.checks_s) == 2)


def test_failed_check_is_retried(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service_module, "FIRST_RETRY_S", 0.2)
    (tmp_path / "store").write_text("in the way")
    with running(settings, tmp_path) as (service, watcher):
        await_(lambda: service.health()[1]["consecutive_failures"] == 3)
        assert service.health()[0], "the process is alive and reports the failure"
        (tmp_path / "store").unlink()
        await_(lambda: watcher.checks_s and service.health()[1]["consecutive_failures"] == 0)
    output = capfd.readouterr().out
    assert "cannot be read or written" in output
    assert "Retrying in 0 s." in output
    assert "retrain: No release has been promoted yet" in output


def test_unavailable_source_is_retried(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service_module, "FIRST_RETRY_S", 0.2)
    (tmp_path / "images").rename(tmp_path / "elsewhere")
    with running(settings, tmp_path) as (service, watcher):
        await_(lambda: service.health()[1]["consecutive_failures"] == 2)
        (tmp_path / "elsewhere").rename(tmp_path / "images")
        await_(lambda: len(watcher.checks_s) > 2 and service.health()[1]["consecutive_failures"] == 0)
    output = capfd.readouterr().out
    assert f"The image directory {tmp_path / 'images'} does not exist. Retrying in 0 s." in output
    assert "retrain: No release has been promoted yet" in output


def test_internal_error_is_retried(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_module, "FIRST_RETRY_S", 0.1)
    monkeypatch.setattr(CountedWatcher, "check", lambda self, act=True: self.checks_s.append(0.0) or 1 / 0)
    with running(settings, tmp_path) as (_, watcher):
        await_(lambda: len(watcher.checks_s) >= 2)
    assert "ZeroDivisionError" in caplog.text


class Shutdown:
    """Delays a job until its service shuts down."""

    def __init__(self) -> None:
        self.job_runs = threading.Event()
        self.service: WatchService | None = None

    def await_(self) -> None:
        self.job_runs.set()
        await_(lambda: self.service and not self.service._scheduler.running)


@pytest.mark.parametrize("event", ["failure", "change"])
def test_process_ends_after_a_check_that_requires_another(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    shutdown = Shutdown()

    def check(self: CountedWatcher, act: bool = True) -> CheckReport:
        shutdown.await_()
        if event == "failure":
            raise StoreError("The store is unreachable.")
        return Watcher.check(self, act=False)

    monkeypatch.setattr(CountedWatcher, "check", check)
    with running(settings, tmp_path) as (shutdown.service, _):
        assert shutdown.job_runs.wait(30)
        if event == "change":
            shutdown.service.changed()


def test_process_ends_after_a_prune_that_fails(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutdown = Shutdown()

    def prune(*_: object) -> None:
        shutdown.await_()
        raise StoreError("The store is unreachable.")

    monkeypatch.setattr(service_module, "prune_store", prune)
    with running(make_settings(tmp_path, prune_keep=1), tmp_path) as (shutdown.service, _):
        assert shutdown.job_runs.wait(30)


def test_failed_listener_reconnects(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service_module, "FIRST_RETRY_S", 0.1)
    listened: list[str] = []
    stopped = threading.Event()

    def listen(source: str, on_change: Callable[[], None]) -> None:
        listened.append(source)
        if len(listened) > 2:
            stopped.wait(30)
        raise KeyError("Records")

    monkeypatch.setattr(service_module, "listen", listen)
    with running(settings, tmp_path):
        await_(lambda: len(listened) > 2)
    output = capfd.readouterr().out
    assert "Bucket notifications are unavailable: internal error: KeyError: 'Records' Retrying in 0 s." in output
    listener = next(thread for thread in threading.enumerate() if thread.name == "bucket-events")
    stopped.set()
    listener.join(20)
    assert not listener.is_alive()
    assert "unavailable" not in capfd.readouterr().out, "a stopped watcher has nothing to report"


def test_paused_watcher_checks_nothing(settings: Settings, tmp_path: Path) -> None:
    schedule = ScheduleStore(open_store(settings.store_uri))
    schedule.switch(False, "U1")
    with running(make_settings(tmp_path, interval_s=1), tmp_path) as (service, watcher):
        await_(lambda: "Paused" in str(service.health()[1]["status"]))
        time.sleep(1.2)
        assert watcher.checks_s == []
        schedule.switch(True, "U1")
        await_(lambda: watcher.checks_s)


def test_health_probe_reports_stuck_checks(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = settings_on_free_ports().inference_port

    def probe() -> tuple[int, dict[str, object]]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    with running(make_settings(tmp_path, health_port=port), tmp_path) as (service, watcher):
        await_(lambda: watcher.checks_s)
        await_(lambda: str(probe()[1]["status"]).startswith("retrain"))
        assert probe()[0] == 200
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
            assert b"# TYPE evernear_live_accuracy gauge" in response.read()
        monkeypatch.setattr(service_module, "STUCK_AFTER_S", -4000.0)
        assert probe()[0] == 503
        with pytest.raises(ServingError, match=r"health probe cannot listen on 127\.0\.0\.1"):
            WatchService(watcher, make_settings(tmp_path, health_port=port)).run()
        assert not service.stopping.is_set()


def test_metrics_are_those_of_the_last_check() -> None:
    def values(report: CheckReport | None) -> dict[str, float]:
        families = text_string_to_metric_families(exposition(report).decode())
        return {f"{s.name} {s.labels['version']}": s.value for family in families for s in family.samples}

    assert values(None) == {}
    figures = {
        "live_labels": 100,
        "live_accuracy": 0.91,
        "live_accuracy_low": 0.84,
        "class_mix_difference": 0.2,
        "new_files": 3,
    }
    report = CheckReport(
        at=datetime(2027, 3, 1, tzinfo=UTC), champion="v", action="nothing", reasons=(), figures=figures
    )
    assert values(report) == {
        "evernear_live_labels v": 100,
        "evernear_live_accuracy v": 0.91,
        "evernear_live_accuracy_low v": 0.84,
        "evernear_class_mix_difference v": 0.2,
    }


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_process_ends_after_its_check(
    settings: Settings, tmp_path: Path, number: signal.Signals, exit_code: int
) -> None:
    command = [
        *(sys.executable, "-c", "from evernear.cli.app import main; main()", "watch"),
        *("--workdir", str(tmp_path), "--source", settings.data.source),
        *("--set", f"store={settings.store}", "--set", "watch.health_port=0"),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KUBERNETES_")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as run:
        assert run.stdout is not None
        lines = [run.stdout.readline()]
        while not lines[-1].split(" ", 1)[-1].startswith("retrain") and run.poll() is None:
            lines.append(run.stdout.readline())
        run.send_signal(number)
        assert run.wait(timeout=30) == exit_code
        rest = run.stdout.read()
        assert "Traceback" not in "".join(lines) + rest
        assert rest.count("evernear: Interrupted after the last check. No process is left") == (number == signal.SIGINT)
    assert len(list(RequestStore(open_store(settings.store_uri)).list())) == 1


class FakeBaker(Baker):
    """Its polls return or raise ``results`` in turn."""

    def __init__(self, *results: str | EvernearError) -> None:
        self.results = list(results)

    def poll(self) -> str:
        result = self.results.pop(0)
        if isinstance(result, EvernearError):
            raise result
        return result


def test_bake_is_polled_and_a_lasting_failure_is_reported_once(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service_module, "BAKE_INTERVAL_S", 0.05)
    down = StoreError("The store is down.")
    baker = FakeBaker("began", "", down, down, down, "ended", down, *[""] * 1000)
    watcher = CountedWatcher(settings, tmp_path)
    service = WatchService(watcher, settings, baker)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        await_(lambda: len(baker.results) < 990)
        watcher.schedule.switch(False, "Ada")
        await_(lambda: is_constant(baker.results))
        watcher.schedule.switch(True, "Ada")
        count = len(baker.results)
        await_(lambda: len(baker.results) < count)
    finally:
        service.stopping.set()
        thread.join(timeout=20)
    reported = [line.partition("Z ")[2] for line in capsys.readouterr().out.splitlines()]
    fault = "The bake is interrupted: The store is down. Trying again in 0 s."
    assert [line for line in reported if line in ("began", "ended", fault)] == ["began", fault, "ended", fault]


def is_constant(results: list[str | EvernearError]) -> bool:
    count = len(results)
    time.sleep(0.3)
    return len(results) == count


@pytest.mark.parametrize(
    ("target", "bake_s", "is_baked"), [("kubernetes", 900, True), ("kubernetes", 0, False), ("registry", 900, False)]
)
def test_only_releases_in_a_cluster_are_baked(tmp_path: Path, target: str, bake_s: int, is_baked: bool) -> None:
    tree = {"store": (tmp_path / "store").as_uri(), "target": target, "watch": {"bake_s": bake_s}}
    settings = Settings.model_validate(tree)
    baker = baker_of(settings, open_store(settings.store_uri), None)
    assert (baker is not None) is is_baked
    assert baker is None or baker.poll() == ""  # nothing was promoted
