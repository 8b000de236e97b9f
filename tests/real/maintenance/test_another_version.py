"""A store of another version of evernear is named and never changed, whatever the command.

`old` is a store that commit 7cf9565d wrote (see README.md). In `newer` stores, the number of some
documents is raised, and they have a field that this version does not know.
"""

import hashlib
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import typer

from evernear.cli.app import app
from evernear.common.frozen import FORMAT, Document, own_version, stamp
from evernear.common.parts import Part, Parts
from evernear.common.progress import step
from evernear.common.run_record import RunRecord
from evernear.common.step_results import Computed, compute_once
from evernear.common.store import FileStore, Store, open_store
from evernear.common.store.current import current_store
from evernear.data.books import local_tables
from evernear.data.ingest import ingest_source
from evernear.data.tables import TABLES
from evernear.embedding.training_setup import TrainingState, load_checkpoint
from evernear.errors import FormatError, StoreError
from evernear.maintenance.kinds import KINDS, require_all_current
from evernear.release.registry import Registry
from evernear.review.answers import ANSWERS, labels_given
from evernear.review.live_labels import LIVE_LABELS, labeled_queries
from evernear.serving.query_log_files import QUERIES, parse_file
from evernear.settings import DataSettings
from tests.command_line import evernear
from tests.real.maintenance.conftest import write_images
from tests.releases import MakeRelease

OLD_RELEASE = "20261128.195353.e731aa50"
ARCHIVE = Path(__file__).with_name("store-7cf9565d.tar.gz")
REFUSES: dict[str, tuple[str, ...]] = {
    "run": ("--source", "folder:{images}"),
    "reindex": ("--source", "folder:{images}"),
    "demo": (),
    "tune": ("--source", "folder:{images}"),
    "trial": ("--source", "folder:{images}"),
    "report": (),
    "runs": (),
    "console": ("--source", "folder:{images}", "--port", "0"),
    "status": (),
    "doctor": ("store",),
    "predict": ("{images}/a/0-0.png",),
    "batch-predict": ("--source", "folder:{images}", "--out", "{out}"),
    "serve": (),
    "forget": ("--yes",),
    "inspect run": (OLD_RELEASE, "--image", "{images}/a/0-0.png"),
    "registry list": (),
    "registry show": (OLD_RELEASE,),
    "registry anchor": (OLD_RELEASE, "--why", "test"),
    "registry promote": (OLD_RELEASE, "--force", "--why", "test"),
    "registry rollback": (),
    "registry restore": (OLD_RELEASE,),
    "labels check": ("--source", "folder:{images}"),
    "labels import": ("{labels}",),
    "dataset export": ("--format", "folder", "--out", "{out}"),
    "store check": (),
    "store prune": ("--keep", "1"),
    "watch": ("--on",),
    "watch once": ("--act",),
    "slack": (),
    "pod fetch": ("--release", OLD_RELEASE, "--sha256", 64 * "0"),
}
"""Every command that opens a store by itself, with arguments that would change it."""
SLACK = {
    "SLACK_BOT_TOKEN": "xoxb-test",
    "SLACK_APP_TOKEN": "xapp-test",
    "EVERNEAR_PIPELINE__ENDPOINT": "http://127.0.0.1:9",
}
ALSO_REFUSES = (("store", "check", "--repair"), ("store", "prune", "--dry-run"), ("forget",), ("watch", "--status"))
OTHERS = {
    "stop": "opens no store",
    "token": "opens no store",
    "ready": "opens no store",
    "slack ready": "opens no store",
    "pod serve": "opens no store: `pod fetch` does before it",
    "pod ready": "opens no store",
    "prep": "reads records of releases only, and answers with the sentence",
    "deployment render": "needs a cluster; reads records of releases only",
    "pipeline upload": "opens no store",
    "pipeline schedule": "opens no store",
    "pipeline run": "needs a server of Kubeflow Pipelines",
    "pipeline status": "needs a server of Kubeflow Pipelines",
    "pipeline stop": "needs a server of Kubeflow Pipelines",
}


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    if not hasattr(group, "commands") or group.invoke_without_command:
        yield " ".join(path)
    for name, child in getattr(group, "commands", {}).items():
        yield from commands(child, (*path, name))


def test_every_command_is_classified() -> None:
    assert {*commands(typer.main.get_command(app))} == REFUSES.keys() | OTHERS.keys()
    assert not REFUSES.keys() & OTHERS.keys()


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(directory, filter="data")
    write_images(directory / "images", 2, 0)
    (directory / "labels.csv").write_text("id,label\n1,a\n")
    return directory


@pytest.fixture
def old_workdir(unpacked: Path, tmp_path: Path) -> Path:
    shutil.copytree(unpacked, tmp_path / "work")
    return tmp_path / "work"


def contents(store: Path) -> dict[str, str]:
    files = (path for path in store.rglob("*") if path.is_file() and ".staging" not in path.parts)
    return {str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def require_refusal(workdir: Path, *command: str, sentence: str) -> None:
    places = {"images": workdir / "images", "labels": workdir / "labels.csv", "out": workdir / "out"}
    before = contents(workdir / "store")
    words = (*(word.format(**places) for word in command), "--workdir", workdir, "--set", "target=registry")
    done = evernear(*words, environment=SLACK)
    assert done.returncode == StoreError.exit_code, done.stdout + done.stderr
    assert done.stderr.count(sentence) == 1, done.stderr
    assert "DAMAGED" not in done.stdout
    assert "--repair" not in done.stderr
    assert contents(workdir / "store") == before
    assert not (workdir / "out").exists()
    assert not (workdir / "runs").exists()


@pytest.mark.parametrize("command", [*([*name.split(), *words] for name, words in REFUSES.items()), *ALSO_REFUSES])
def test_command_refuses_an_old_and_a_newer_store(old_workdir: Path, command: list[str]) -> None:
    require_refusal(old_workdir, *command, sentence=f"evernear {own_version()} here reads format {FORMAT}")
    upgrade(old_workdir / "store")
    require_refusal(old_workdir, *command, sentence=f"evernear 9.9.9 wrote it in format {FORMAT + 1}")


def upgrade(store: Path) -> None:
    """As if a later version had written all documents in JSON."""
    for path in store.rglob("*.json"):
        fields = json.loads(path.read_text())
        path.write_text(json.dumps(fields | raised()))


def raised() -> dict[str, object]:
    return {"format": FORMAT + 1, "evernear_version": "9.9.9", "not_known": 1}


@pytest.mark.parametrize("key", ["head", "manifest", "champion", "record"])
def test_store_with_one_newer_document_is_not_run_on(
    key: str, make_stub: MakeRelease, old_workdir: Path, tmp_path: Path
) -> None:
    shutil.rmtree(old_workdir / "store")
    store = FileStore(old_workdir / "store")
    manifest = ingest_source(DataSettings(source=f"folder:{old_workdir / 'images'}"), store.uri)
    release = make_stub()
    Registry(store).publish(release.archive)
    Registry(store).set_champion(release.version, None)
    assert current_store(store.uri).uri == store.uri
    newer = {
        "head": f"datasets/{manifest.name}/head.json",
        "manifest": f"datasets/{manifest.name}/manifests/{manifest.digest}.json",
        "champion": "releases/champion.json",
        "record": f"releases/manifests/{release.version}.json",
    }[key]
    store.put(newer, json.dumps(json.loads(store.get(newer)) | raised()).encode())
    for command in ("run", "reindex", "status", "report"):
        require_refusal(old_workdir, command, sentence=f"{store.uri}/{newer} is of another version of evernear")
    with pytest.raises(SystemExit), step("train", "a-run", store.uri):
        current_store(store.uri)
    assert not [*store.list("runs/")]


def test_store_whose_first_run_failed_is_not_run_on(old_workdir: Path) -> None:
    """It would have documents of both versions, and could then be neither checked nor pruned."""
    shutil.rmtree(old_workdir / "store/datasets")
    shutil.rmtree(old_workdir / "store/releases")
    require_refusal(old_workdir, *("run", *REFUSES["run"]), sentence="is of another version of evernear")


# Kinds of documents


def newer_of(pattern: str) -> bytes:
    document = json.dumps(stamp() | raised()).encode()
    if not pattern.endswith(".parquet"):
        return json.dumps(stamp()).encode() * pattern.endswith("answers.jsonl") + b"\n" + document
    buffer = BytesIO()
    pq.write_table(pa.table({"not_known": [1]}).replace_schema_metadata({"evernear": document}), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("pattern", [pattern for pattern, compare in KINDS.items() if compare])
def test_maintenance_refuses_a_store_with_one_newer_document_of_any_kind(old_workdir: Path, pattern: str) -> None:
    shutil.rmtree(old_workdir / "store")
    key, store = pattern.replace("*", "x"), FileStore(old_workdir / "store")
    store.put(key, newer_of(pattern).lstrip(b"\n"))
    for command in (("check",), ("check", "--repair"), ("prune",), ("prune", "--dry-run")):
        require_refusal(old_workdir, "store", *command, sentence=f"{store.uri}/{key} is of another version")
    for command in (("forget",), ("forget", "--yes")):
        require_refusal(old_workdir, *command, sentence=f"evernear 9.9.9 wrote it in format {FORMAT + 1}")


def test_every_object_of_a_run_is_of_a_known_kind(unpacked: Path) -> None:
    keys = [info.key for info in FileStore(unpacked / "store").list("") if "/ledgers/" not in info.key]
    assert keys, "the fixture is of the format before tables"
    assert [key for key in keys if not any(fnmatchcase(key, pattern) for pattern in KINDS)] == []


def subclasses(kind: type[Document]) -> Iterator[type[Document]]:
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


@pytest.mark.parametrize("kind", [*subclasses(Document)], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("fields", [raised(), {"field": 1}, {"format": FORMAT - 1}, {"part": {"format": 2}} | stamp()])
def test_document_of_another_version_is_not_called_invalid(kind: type[Document], fields: dict[str, object]) -> None:
    with pytest.raises(FormatError, match=r"^notes\.json is of another version of evernear and was not changed: "):
        kind.from_json(json.dumps(fields), "notes.json")


def read_a_record(store: Store) -> None:
    RunRecord(store, "a-run").load("settings")


def read_a_result(store: Store) -> None:
    compute_once(store, "a-key", None, lambda: Computed("", {}))


def read_a_part(store: Store) -> None:
    Parts.make(store, "parts/a-run/embed-0", "embed", {}, [Part(units=1)]).result(0)


READERS: dict[str, Callable[[Store], object]] = {
    "runs/a-run/settings.json": read_a_record,
    "checkpoints/a-key/result.json": read_a_result,
    "parts/a-run/embed-0/results/000000": read_a_part,
    ANSWERS: labels_given,
    f"{LIVE_LABELS}20260203T000000000000Z-1.jsonl": labeled_queries,
    f"{QUERIES}a.jsonl": lambda store: parse_file(store.get(f"{QUERIES}a.jsonl"), "a.jsonl"),
}


@pytest.mark.parametrize("key", READERS)
def test_reader_of_a_newer_document_refuses_it(key: str, tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    store.put(key, json.dumps(raised()).encode())
    with pytest.raises(FormatError, match=r"evernear 9\.9\.9 wrote it"):
        READERS[key](store)


def test_newer_checkpoint_is_not_trained_on(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    with (tmp_path / "state.pt").open("wb") as file:
        torch.save(raised(), file)
    store.put("checkpoints/a-key/state.pt", tmp_path / "state.pt")
    state: TrainingState = object.__new__(TrainingState)
    with pytest.raises(FormatError, match=r"state\.pt is of another version"):
        load_checkpoint(store, "a-key", state)


def test_newer_tables_are_not_read(old_workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, settings = FileStore(old_workdir / "store2"), DataSettings(source=f"folder:{old_workdir / 'images'}")
    manifest = ingest_source(settings, store.uri)
    monkeypatch.setattr("evernear.common.frozen.FORMAT", FORMAT - 1)
    with pytest.raises(FormatError, match=rf"\.parquet is of another version .* in format {FORMAT}"):
        local_tables(store, manifest, TABLES, old_workdir)


def test_store_of_this_version_is_compared_and_accepted(old_workdir: Path) -> None:
    """The one document of a later version is found among the others."""
    store = FileStore(old_workdir / "store2")
    ingest_source(DataSettings(source=f"folder:{old_workdir / 'images'}"), store.uri)
    require_all_current(store)
    (pattern,) = [each for each in KINDS if each.startswith("review/submitted/")]
    store.put(pattern.replace("*", "x"), newer_of(pattern).lstrip(b"\n"))
    with pytest.raises(FormatError, match=f"in format {FORMAT + 1}"):
        require_all_current(store)
