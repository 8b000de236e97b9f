"""The snapshot of an ingest in parts depends neither on the parts nor on who ran them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evernear.common.parts import OpenWorker, Parts, Task, run_in_processes, run_parts
from evernear.common.store import FileStore, open_store
from evernear.data import parts as parts_module
from evernear.data.ingest import ingest_source
from evernear.data.manifest import Manifest
from evernear.data.parts import IngestPart, RunParts, open_worker
from evernear.data.snapshots import Snapshots
from evernear.data.sources import FileEntry
from evernear.data.sources.folder import Folder
from evernear.errors import StoreError
from evernear.maintenance.references import references
from evernear.settings import DataSettings
from tests.dataset_images import write_files
from tests.real.data.test_packed import write_tar
from tests.small_ingest import ingest_with

RunIngest = Callable[..., Manifest]


@pytest.fixture
def varied(tree: Path, make_image) -> Path:
    """`tree` with copies, copies under another label, a broken file, one that is no image, and
    frames of scenes."""
    write_files(tree, {f"1/copy-{number:03}.png": make_image(number) for number in range(0, 18, 3)})
    write_files(tree, {f"10/other-{number:03}.png": make_image(number) for number in range(1, 13, 3)})
    write_files(tree, {f"2/scene{number // 6}-{number}.png": make_image(500 + number) for number in range(24)})
    text = b"This is a text that is longer than the signature of an image."
    return write_files(tree, {"2/broken.png": b"\x89PNG\r\n\x1a\n broken", "2/readme": text})


@pytest.fixture
def ingest_in_parts(tmp_path: Path) -> RunIngest:
    """``ingest_in_parts(source, run, **settings)`` ingests with ``run`` as what runs the parts."""

    def ingest_in_parts(source: Path | str, run: RunParts = run_parts, **settings: object) -> Manifest:
        source = f"folder:{source}" if isinstance(source, Path) else source
        return ingest_with(source, (tmp_path / "store").as_uri(), run=run, **settings)

    return ingest_in_parts


def tasks(parts: Parts) -> list[Task]:
    return [*parts.tasks(range(parts.plan.parts))]


def entries(task: Task) -> list[FileEntry]:
    return IngestPart.from_json(task[1], "").entries


def parts_of(store: Path) -> list[Path]:
    return [path for path in (store / "datasets").rglob("parts/**/*") if path.is_file()]


def found(manifest: Manifest) -> object:
    return manifest.digest, manifest.problems, manifest.problem_counts, manifest.groups


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"group": "stem"}])
def test_snapshot_does_not_depend_on_the_parts(varied: Path, ingest_in_parts: RunIngest, make_image, settings) -> None:
    counts: list[int] = []

    def run(parts: Parts, open_here: OpenWorker) -> None:
        counts.append(parts.plan.parts)
        # The last parts first: their order does not count either.
        worker = open_here(parts)
        for number, value in reversed(tasks(parts)):
            parts.save_result(number, worker(number, value))

    names = {"one": 1000, "three": 27, "many": 3}
    first = {
        name: ingest_in_parts(varied, run, dataset=name, part_names=size, **settings) for name, size in names.items()
    }
    assert counts == [1, 3, 24]
    assert {"undecodable", "duplicate", "conflicting_labels", "not_an_image"} <= first["one"].problem_counts.keys()
    write_files(varied, {f"1/scene{number // 7}-{number}.png": make_image(number) for number in range(2000, 2012)})
    for path in sorted((varied / "2").glob("scene*"))[::5]:
        path.rename(varied / "1" / path.name)
    second = {
        name: ingest_in_parts(varied, run, dataset=name, part_names=size, **settings) for name, size in names.items()
    }
    for manifests in (first, second):
        assert [found(manifest) for manifest in manifests.values()] == [found(manifests["one"])] * len(names)
    assert first["one"].digest != second["one"].digest


@pytest.mark.slow
def test_processes_that_open_the_source_themselves_decode_the_same(varied: Path, ingest_in_parts: RunIngest) -> None:
    def run(parts: Parts, _: OpenWorker) -> None:
        run_in_processes(parts, open_worker, 2, lambda *_: None)

    assert found(ingest_in_parts(varied, run, dataset="two", part_names=24)) == found(
        ingest_in_parts(varied, dataset="one")
    )


@pytest.mark.slow
def test_snapshot_does_not_depend_on_the_number_of_workers(varied: Path, ingest_in_parts: RunIngest) -> None:
    """Worker *i* of *n* opens the source itself, and runs the parts ``i::n``, as a pod does."""

    def ingest_with_workers(workers: int) -> Manifest:
        def run(parts: Parts, _: OpenWorker) -> None:
            def work(index: int) -> None:
                worker = open_worker(parts)
                for number, value in tasks(parts)[index::workers]:
                    parts.save_result(number, worker(number, value))

            with ThreadPoolExecutor(workers) as pool:
                list(pool.map(work, range(workers)))

        return ingest_in_parts(varied, run, dataset=f"of-{workers}", part_names=5)

    one, three, eight = (found(ingest_with_workers(workers)) for workers in (1, 3, 8))
    assert one == three == eight


def test_ingest_that_was_killed_ends_as_if_it_began_now(varied, ingest_in_parts, make_image, monkeypatch) -> None:
    """Files that are gone, new or changed since do not matter, and the parts that were finished are
    not read again."""

    finished: set[str] = set()

    def killed(parts: Parts, open_here: OpenWorker) -> None:
        worker = open_here(parts)
        planned = tasks(parts)
        for number in (0, 2, 3):
            parts.save_result(number, worker(*planned[number]))
            finished.update(entry.name for entry in entries(planned[number]))
        decoded, waiting = entries(planned[2]), entries(planned[4])
        (varied / waiting[0].name).unlink()
        (varied / decoded[0].name).unlink()
        (varied / decoded[1].name).write_bytes(make_image(3000))
        finished.difference_update((decoded[1].name, "2/broken.png"))
        (varied / "1" / "new.png").write_bytes(make_image(3001))
        raise KeyboardInterrupt

    form = {"size_px": 6, "bit_depth": 16, "part_names": 12}
    with pytest.raises(KeyboardInterrupt):
        ingest_in_parts(varied, killed, dataset="killed", **form)
    read: list[str] = []
    real_read = Folder.read
    monkeypatch.setattr(Folder, "read", lambda folder, name: read.append(name) or real_read(folder, name))
    continued = ingest_in_parts(varied, dataset="killed", **form)
    assert not finished.intersection(read)
    assert found(continued) == found(ingest_in_parts(varied, dataset="whole", **form))
    assert finished.intersection(read)


@pytest.mark.slow
def test_ingest_that_loses_its_parts_to_another_one_starts_over(
    varied: Path, ingest_in_parts: RunIngest, tmp_path
) -> None:
    for moment in ("before", "after"):
        others: list[Manifest] = []

        def raced(parts: Parts, open_here: OpenWorker, moment: str = moment, others: list[Manifest] = others) -> None:
            if moment == "after":
                run_parts(parts, open_here)
            if not others:
                others.append(ingest_in_parts(varied, dataset=moment))
            run_parts(parts, open_here)

        manifest = ingest_in_parts(varied, raced, dataset=moment)
        assert found(manifest) == found(others[0])
        assert parts_of(tmp_path / "store") == []


def test_damaged_result_is_decoded_again(varied: Path, ingest_in_parts: RunIngest, tmp_path: Path) -> None:
    damaged: list[Path] = []

    def run(parts: Parts, open_here: OpenWorker) -> None:
        run_parts(parts, open_here)
        if not damaged:
            damaged.append(next(path for path in parts_of(tmp_path / "store") if path.suffix == ".raw"))
            damaged[0].write_bytes(b"")

    assert found(ingest_in_parts(varied, run, dataset="damaged")) == found(ingest_in_parts(varied, dataset="whole"))
    assert damaged


def test_keys_that_may_not_delete_leave_parts_that_nothing_needs(
    varied, ingest_in_parts, tmp_path, monkeypatch
) -> None:
    def refused(*_: object) -> None:
        raise StoreError("403")

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "delete", refused)
        manifest = ingest_in_parts(varied, dataset="photos")
        assert ingest_in_parts(varied, dataset="photos").digest == manifest.digest
    store = open_store((tmp_path / "store").as_uri())
    left = {info.key for info in store.list("datasets/photos/parts/")}
    needed = {reference.key for reference in references(store)}
    assert left - needed
    assert all(manifest.digest in key for key in left & needed), "the broken file was read again"
    Snapshots(store, "photos").interrupt_ingests()
    assert parts_of(tmp_path / "store") == []


@pytest.mark.slow
def test_part_is_limited_by_the_bytes_of_its_files_and_pixels(
    varied: Path, ingest_in_parts: RunIngest, monkeypatch
) -> None:
    sizes: list[list[int]] = []

    def run(parts: Parts, open_here: OpenWorker) -> None:
        sizes.append([sum(entry.size_bytes for entry in entries(task)) for task in tasks(parts)])
        run_parts(parts, open_here)

    monkeypatch.setattr(parts_module, "PART_SIZE_BYTES", 2**11)
    whole = ingest_in_parts(varied, run, dataset="small")
    assert len(sizes[0]) > 3
    assert max(sizes[0]) <= 2**11
    assert found(ingest_in_parts(varied, run, dataset="large", size_px=60)) != found(whole)
    assert len(sizes[1]) == 71, "one image has 3,600 bytes of pixels"


def test_file_of_many_images_is_in_one_part(tmp_path: Path, make_image, ingest_in_parts: RunIngest) -> None:
    folder = tmp_path / "tars"
    for number in range(5):
        images = [make_image(100 * number + member) for member in range(8)]
        write_tar(folder / f"train-{number}", images, ["a", "b"] * 4)
    names: list[list[set[str]]] = []

    def run(parts: Parts, open_here: OpenWorker) -> None:
        each = [entries(task) for task in tasks(parts)]
        names.append([{entry.name.split("/")[0] for entry in entries} for entries in each])
        run_parts(parts, open_here)

    source = f"webdataset:{folder}"
    manifests = [ingest_in_parts(source, run, dataset=f"of-{size}", part_names=size) for size in (1, 16, 1000)]
    assert [len(parts) for parts in names] == [5, 3, 1]
    assert sum(map(len, names[1])) == 5
    assert len({manifest.digest for manifest in manifests}) == 1


def test_table_in_a_bucket_is_read_by_a_process_that_did_not_list_it(bucket: str, make_image, tmp_path: Path) -> None:
    store = open_store(f"s3://{bucket}/images")
    rows = [f"{number}.png,{'ab'[number % 2]}" for number in range(12)]
    for number in range(12):
        store.put(f"{number}.png", make_image(number))
    store.put("table.csv", "\n".join(["path,label", *rows]).encode())

    def run(parts: Parts, _: OpenWorker) -> None:
        run_parts(parts, open_worker)

    settings = DataSettings(source=f"table:{store.uri}/table.csv")
    manifest = ingest_source(settings, (tmp_path / "store").as_uri(), run=run)
    assert sum(shard.count for shard in manifest.shards) == 12
