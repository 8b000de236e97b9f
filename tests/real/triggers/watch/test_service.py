"""The process: periods, failures, pause, health probe, metrics, bake, pruning, end."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from evernear.cli.triggers import baker_of
from evernear.common.run_record import RunRecord, StepRecord
from evernear.common.store import open_store
from evernear.data.ingest import ingest_source
from evernear.data.manifest import manifest_key
from evernear.errors import EvernearError, ServingError, StoreError
from evernear.settings import Settings
from evernear.triggers.requests import RequestStore
from evernear.triggers.watch.baker import BAKE_INTERVAL_S, Baker
from evernear.triggers.watch.schedule_state import CheckReport
from evernear.triggers.watch.watcher import FIGURES, LastCheck, Watcher, WatchService
from tests.real.triggers.watch.watched import noise
from tests.releases import settings_on_free_ports

IMAGES = 30


def make_settings(directory: Path, **watch: object) -> Settings:
    """A source without a release: every check decides to train."""
    for number in range(IMAGES):
        path = directory / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(noise(number))
    return Settings.model_validate(
        {
            "workdir": directory / "work",
            "store": (directory / "store").as_uri(),
            "data": {"source": f"folder:{directory / 'images'}"},
            "watch": {"interval_s": 3600, "health_port": 0, **watch},
        }
    )


class FakeBaker(Baker):
    """Its polls return or raise ``results`` in turn."""

    def __init__(self, *results: str | EvernearError) -> None:
        self.results = list(results)

    def poll(self) -> str:
        result = self.results.pop(0)
        if isinstance(result, EvernearError):
            raise result
        return result


class TimedWatcher(Watcher):
    """A watcher whose checks take ``takes_s`` of its clock, and may fail."""

    now_s = takes_s = 0.0
    fails: Exception | None = None

    def check(self, act: bool = True) -> CheckReport:
        self.now_s += self.takes_s
        if self.fails:
            raise self.fails
        return super().check(act)


@dataclass
class Process:
    directory: Path

    def make(self, baker: Baker | None = None, **watch: object) -> tuple[WatchService, TimedWatcher]:
        settings = make_settings(self.directory, **watch)
        watcher = TimedWatcher(settings, open_store(settings.store_uri), None, self.directory)
        return WatchService(watcher, settings, baker, lambda: watcher.now_s), watcher


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process(tmp_path)


def test_checks_follow_the_interval_unless_they_take_more_than_a_tenth_of_it(
    process: Process, capsys: pytest.CaptureFixture[str]
) -> None:
    service, watcher = process.make()
    for takes_s, wait_s in ((0, 3600), (100, 3500), (1000, 9000), (100, 3500)):
        watcher.takes_s = takes_s
        assert service.check() == wait_s
    sentences = [line.partition("Z ")[2] for line in capsys.readouterr().out.splitlines()]
    assert [line for line in sentences if "took" in line] == ["The check took 1000 s, so the next one is in 9000 s."]
    assert len(list(RequestStore(open_store((process.directory / "store").as_uri())).list())) == 1


@pytest.mark.parametrize("broken", ["store", "images"])
def test_failed_check_is_retried_with_increasing_delays(
    process: Process, broken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    service, _ = process.make(interval_s=100)
    path, elsewhere = process.directory / broken, process.directory / "elsewhere"
    service.check()
    path.rename(elsewhere)
    if broken == "store":
        path.write_text("in the way")
    assert [service.check() for _ in range(4)] == [30, 60, 100, 100]
    is_healthy, details = service.health()
    assert is_healthy, "the process is alive and reports the failure"
    assert details["consecutive_failures"] == 4
    if broken == "store":
        path.unlink()
    elsewhere.rename(path)
    fault = {"store": "cannot be read or written", "images": f"The image directory {path} does not exist."}[broken]
    output = capsys.readouterr().out
    assert fault in output
    assert "Retrying in 30 s." in output
    assert service.check() == 100
    assert service.health()[1]["consecutive_failures"] == 0
    assert "retrain: No release has been promoted yet" in capsys.readouterr().out


def test_internal_error_is_logged_and_retried(process: Process, caplog: pytest.LogCaptureFixture) -> None:
    service, watcher = process.make()
    watcher.fails = KeyError("champion")
    assert service.check() == 30
    assert "KeyError" in caplog.text
    assert service.health()[1]["status"] == "Internal error: KeyError: 'champion' Retrying in 30 s."


def test_paused_watcher_checks_and_bakes_nothing(process: Process) -> None:
    baker = FakeBaker("began")
    service, watcher = process.make(baker)
    watcher.schedule.switch(False, "U1")
    assert (service.check(), service.bake()) == (3600, BAKE_INTERVAL_S)
    assert service.health()[1]["status"] == "Paused; `evernear watch --on` resumes it."
    assert watcher.schedule.read().last is None
    assert baker.results == ["began"]
    watcher.schedule.switch(True, "U1")
    service.check()
    service.bake()
    assert watcher.schedule.read().last
    assert baker.results == []


def test_lasting_failure_of_a_bake_is_reported_once(process: Process, capsys: pytest.CaptureFixture[str]) -> None:
    down = StoreError("The store is down.")
    service, _ = process.make(FakeBaker("began", "", down, down, down, "ended", down))
    for _ in range(7):
        assert service.bake() == BAKE_INTERVAL_S
    reported = [line.partition("Z ")[2] for line in capsys.readouterr().out.splitlines()]
    fault = "The bake is interrupted: The store is down. Retrying in 10 s."
    assert reported == ["began", fault, "ended", fault]


def test_store_is_pruned_once_a_day_and_later_during_a_run(
    process: Process, capsys: pytest.CaptureFixture[str]
) -> None:
    """The older of two snapshots is garbage."""
    service, _ = process.make(prune_keep=1)
    store, images = open_store((process.directory / "store").as_uri()), make_settings(process.directory).data
    first = manifest_key("images", ingest_source(images, store.uri).digest)
    (process.directory / "images" / "a" / "more.png").write_bytes(noise(IMAGES))
    second = manifest_key("images", ingest_source(images, store.uri).digest)
    step = StepRecord(step="train", state="running", started=datetime.now(UTC), host="elsewhere/1")
    RunRecord(store, "busy").save_step(step)
    assert service.prune() == 3600
    assert "Run busy is in progress" in capsys.readouterr().out
    assert store.find(first)

    end = {"step": "notify", "state": "finished", "started": datetime.now(UTC)}
    RunRecord(store, "busy").save_step(step.model_copy(update=end))
    assert service.prune() == 24 * 3600
    assert "Pruned the store: deleted " in capsys.readouterr().out
    assert (store.find(first), bool(store.find(second))) == (None, True)


@pytest.mark.parametrize(
    ("baker", "prune_keep", "tasks"),
    [(None, None, {"check"}), (FakeBaker(), None, {"check", "bake"}), (None, 1, {"check", "prune"})],
)
def test_every_task_is_repeated_until_the_process_ends(
    process: Process, monkeypatch: pytest.MonkeyPatch, baker: Baker | None, prune_keep: int | None, tasks: set[str]
) -> None:
    service, _ = process.make(baker, prune_keep=prune_keep)
    calls: Counter[str] = Counter()

    def act(task: str) -> float:
        calls[task] += 1
        if {name for name, count in calls.items() if count > 1} == tasks:
            service.stopping.set()
        return 0.01

    for task in ("check", "bake", "prune"):
        monkeypatch.setattr(service, task, partial(act, task))
    service.run()
    assert set(calls) == tasks


def test_health_probe_reports_stuck_checks(process: Process) -> None:
    port = settings_on_free_ports().inference_port
    service, watcher = process.make(health_port=port)

    def probe(path: str = "/") -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    with service._serve_probe():
        assert probe()[0] == 200, "the first check may take as long as any other"
        service.check()
        watcher.now_s += 3600 + 1700
        status, details = probe()
        assert (status, json.loads(details)["seconds_since_last_check"]) == (200, 5300)
        assert json.loads(details)["status"].startswith("retrain")
        watcher.now_s += 200
        assert probe()[0] == 503
        assert probe("/metrics")[0] == 200
        assert b"# TYPE evernear_live_accuracy gauge" in probe("/metrics")[1]
        with pytest.raises(ServingError, match=f"Port {port} on 127.0.0.1 is in use .* --set watch.health_port=NUMBER"):
            process.make(health_port=port)[0].run()
    with pytest.raises(urllib.error.URLError):
        probe()


def test_metrics_are_those_of_the_last_check() -> None:
    last, registry = LastCheck(), CollectorRegistry()
    registry.register(last)

    def values() -> dict[str, float]:
        families = text_string_to_metric_families(generate_latest(registry).decode())
        return {f"{s.name} {s.labels['version']}": s.value for family in families for s in family.samples}

    assert values() == {}
    figures = dict.fromkeys(FIGURES, 0.5) | {"new_files": 3.0}
    del figures["live_accuracy_high"]
    last.report = CheckReport(at=datetime.now(UTC), champion="v", action="nothing", reasons=(), figures=figures)
    assert values() == {
        "evernear_live_labels v": 0.5,
        "evernear_live_accuracy v": 0.5,
        "evernear_live_accuracy_low v": 0.5,
        "evernear_class_mix_difference v": 0.5,
    }


@pytest.mark.parametrize(
    ("number", "exit_code"), [pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow), (signal.SIGINT, 130)]
)
def test_process_ends_after_its_check(tmp_path: Path, number: signal.Signals, exit_code: int) -> None:
    settings = make_settings(tmp_path)
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


@pytest.mark.parametrize(
    ("target", "bake_s", "is_baked"), [("kubernetes", 900, True), ("kubernetes", 0, False), ("registry", 900, False)]
)
def test_only_releases_in_a_cluster_are_baked(tmp_path: Path, target: str, bake_s: int, is_baked: bool) -> None:
    tree = {"store": (tmp_path / "store").as_uri(), "target": target, "watch": {"bake_s": bake_s}}
    settings = Settings.model_validate(tree)
    baker = baker_of(settings, open_store(settings.store_uri), None)
    assert (baker is not None) is is_baked
    assert baker is None or baker.poll() == ""  # nothing was promoted
