"""Tars and Parquet files of many images: read in order, once, and again only if they change."""

import io
import json
import lzma
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evernear.common.store import open_store
from evernear.common.store.base import put_folder
from evernear.data.books import opened_books
from evernear.data.ingest import ingest_source
from evernear.data.manifest import Manifest
from evernear.data.source_diff import diff_source
from evernear.data.sources import open_source
from evernear.data.sources.packed import PackedFiles
from evernear.errors import DataError, SettingsError
from evernear.review.label_target import open_label_target
from evernear.settings import DataSettings
from tests.small_ingest import noted

Sample = tuple[str, bytes]


def tar(path: Path, members: list[Sample], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as file:  # pyright: ignore
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def parquet(
    path: Path,
    images: list[bytes | None],
    labels: list[object],
    names: list[str] | None = None,
    groups: list[object] | None = None,
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"image": [{"bytes": image, "path": None} for image in images], "label": labels})
    if groups is not None:
        table = table.append_column("group", pa.array(groups))
    if names:
        features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": names}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, row_group_size=7)
    return path


def write_tar(path: Path, images: list[bytes], labels: list[str]) -> None:
    pairs = enumerate(zip(images, labels, strict=True))
    tar(path.with_suffix(".tar"), [m for n, (i, k) in pairs for m in ((f"{n:04}.png", i), (f"{n:04}.cls", k.encode()))])


def write_parquet(path: Path, images: list[bytes], labels: list[str]) -> None:
    parquet(path.with_suffix(".parquet"), list(images), list(labels))


def write_arrow(path: Path, images: list[bytes], labels: list[str]) -> None:
    table = pa.table({"image": [{"bytes": image, "path": None} for image in images], "label": labels})
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_stream(path.with_suffix(".arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=9)


FORMATS = [("webdataset", write_tar), ("huggingface", write_parquet), ("huggingface", write_arrow)]


@pytest.fixture
def noise_images(make_image) -> list[bytes]:
    return [make_image(number) for number in range(60)]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are opened, in order."""
    files: list[str] = []
    original = PackedFiles._opened  # pyright: ignore

    def record(self, file: str):
        files.append(file)
        return original(self, file)

    monkeypatch.setattr(PackedFiles, "_opened", record)
    return files


def labels_of(images: list[bytes]) -> list[str]:
    return [("1", "2", "10")[number % 3] for number in range(len(images))]


@pytest.mark.parametrize(("kind", "write"), FORMATS)
def test_files_are_read_once_and_only_new_ones_again(
    tmp_path, noise_images, make_image, run_ingest, contents, digest_of, opened, kind, write
) -> None:
    root = tmp_path / "packed"
    for part in range(3):
        chosen = noise_images[20 * part : 20 * part + 20]
        write(root / f"part-{part}", chosen, labels_of(chosen))
    first = contents(run_ingest(f"{kind}:{root}"))
    assert set(first.label) == set(map(digest_of, noise_images))
    assert len(opened) == 10  # each to be listed, sampled and decoded, and the first for the size of one image
    opened.clear()
    run_ingest(f"{kind}:{root}")
    assert not opened
    new = [make_image(1000 + number) for number in range(3)]
    write(root / "part-3", new, labels_of(new))
    second = contents(run_ingest(f"{kind}:{root}"))
    assert {Path(file).stem for file in opened} == {"part-3"}
    assert len(second) == 63
    assert all(second.split[digest] == split for digest, split in first.split.items())


@pytest.mark.parametrize(("kind", "write"), FORMATS)
def test_bucket_and_directory_give_the_same_dataset(
    tmp_path, noise_images, run_ingest, bucket: str, kind, write
) -> None:
    root = tmp_path / "packed"
    write(root / "part-0", noise_images, labels_of(noise_images))
    local = run_ingest(f"{kind}:{root}", dataset="local")
    put_folder(open_store(f"s3://{bucket}"), "packed", root)
    assert run_ingest(f"{kind}:s3://{bucket}/packed", dataset="remote").digest == local.digest


@pytest.mark.parametrize(("kind", "write"), FORMATS)
def test_names_of_files_say_the_split(tmp_path, noise_images, run_ingest, contents, digest_of, kind, write) -> None:
    root = tmp_path / "packed"
    for name, chosen in (
        ("train", noise_images[:30]),
        ("test", noise_images[30:45]),
        ("validation", noise_images[45:]),
    ):
        write(root / f"{name}-00000-of-00001", chosen, labels_of(chosen))
    found = contents(run_ingest(f"{kind}:{root}"))
    assert {found.split[digest_of(image)] for image in noise_images[30:45]} == {"test"}
    assert {found.split[digest_of(image)] for image in noise_images[45:]} == {"gallery"}
    write(root / "more-00000", noise_images[:3], labels_of(noise_images[:3]))
    with pytest.raises(DataError, match="others do not: more-00000"):
        run_ingest(f"{kind}:{root}")


@pytest.mark.parametrize(("kind", "write"), FORMATS)
def test_watcher_opens_only_new_files(tmp_path, noise_images, run_ingest, opened, kind, write) -> None:
    root = tmp_path / "packed"
    write(root / "part-0", noise_images, labels_of(noise_images))
    manifest = run_ingest(f"{kind}:{root}")
    store = open_store(manifest.store_uri)
    values = DataSettings(source=f"{kind}:{root}")
    opened.clear()
    assert diff_source(values, store, [manifest], manifest)[0].new == 0
    assert not opened
    write(root / "part-1", noise_images[:5], labels_of(noise_images[:5]))
    assert diff_source(values, store, [manifest], manifest)[0].new == 5
    assert {Path(file).stem for file in opened} == {"part-1"}


def tar_of_groups(path: Path, images: list[bytes], labels: list[str], groups: list[str]) -> None:
    rows = [json.dumps({"label": k, "group": g}).encode() for k, g in zip(labels, groups, strict=True)]
    pairs = enumerate(zip(images, rows, strict=True))
    tar(path.with_suffix(".tar"), [m for n, (i, row) in pairs for m in ((f"{n:04}.png", i), (f"{n:04}.json", row))])


def parquet_of_groups(path: Path, images: list[bytes], labels: list[str], groups: list[str]) -> None:
    parquet(path.with_suffix(".parquet"), list(images), list(labels), groups=list(groups))


GROUPED = [("webdataset", tar_of_groups), ("huggingface", parquet_of_groups)]


def scenes_of(images: list[bytes]) -> list[str]:
    return [f"scene {number // 4}" for number in range(len(images))]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "write"), GROUPED)
def test_groups_stay_in_one_split_and_are_remembered(
    tmp_path, noise_images, make_image, run_ingest, contents, digest_of, opened, kind, write, monkeypatch
) -> None:
    root = tmp_path / "packed"
    write(root / "part-0", noise_images, labels_of(noise_images), scenes_of(noise_images))
    first = run_ingest(f"{kind}:{root}", group="column")
    assert first.groups == 15
    before = contents(first).split
    opened.clear()
    assert run_ingest(f"{kind}:{root}", group="column").digest == first.digest
    values, store = DataSettings(source=f"{kind}:{root}", group="column"), open_store(first.store_uri)
    assert diff_source(values, store, [first], first)[0].new == 0
    assert not opened
    new = [make_image(1000 + number) for number in range(15)]
    write(root / "part-1", new, labels_of(new), [f"scene {number}" for number in range(15)])
    second = run_ingest(f"{kind}:{root}", group="column")
    assert second.groups == 15
    assert {Path(file).stem for file in opened} == {"part-1"}
    after = contents(second).split
    for number, image in enumerate(new):
        assert after[digest_of(image)] == before[digest_of(noise_images[4 * number])]
    monkeypatch.setattr("evernear.data.ingest.code_digest", lambda *names: "another decoder")
    again = run_ingest(f"{kind}:{root}", group="column")
    assert groups(again) == groups(second), "as decoded again"


def groups(manifest: Manifest) -> dict[bytes, str]:
    with opened_books(open_store(manifest.store_uri), manifest, ("images",)) as books:
        return dict(books.rows('SELECT digest, "group" FROM images'))


@pytest.mark.parametrize(("kind", "write"), GROUPED)
def test_groups_of_removed_and_changed_files_are_forgotten(tmp_path, noise_images, run_ingest, kind, write) -> None:
    root = tmp_path / "packed"
    first, second = noise_images[:30], noise_images[30:]
    write(root / "part-0", first, labels_of(first), [f"scene {number // 3}" for number in range(30)])
    write(root / "part-1", second, labels_of(second), [f"other {number // 3}" for number in range(30)])
    assert run_ingest(f"{kind}:{root}", group="column").groups == 20
    write(root / "part-0", first, labels_of(first), [f"set {number // 6}" for number in range(30)])
    assert run_ingest(f"{kind}:{root}", group="column").groups == 15
    next(root.glob("part-1*")).unlink()
    assert run_ingest(f"{kind}:{root}", group="column").groups == 5


@pytest.mark.parametrize(("kind", "write"), GROUPED)
def test_groups_of_unchanged_files_may_be_used_later(tmp_path, noise_images, run_ingest, kind, write) -> None:
    write(tmp_path / "packed" / "a", noise_images, labels_of(noise_images), scenes_of(noise_images))
    assert run_ingest(f"{kind}:{tmp_path / 'packed'}").groups == 0
    assert run_ingest(f"{kind}:{tmp_path / 'packed'}", group="column").groups == 15


def test_groups_that_are_not_used_are_said(tmp_path, noise_images) -> None:
    parquet(tmp_path / "hf" / "a.parquet", list(noise_images), list(labels_of(noise_images)), groups=list(range(60)))
    said: list[str] = []
    ingest_source(
        DataSettings(source=f"huggingface:{tmp_path / 'hf'}"), (tmp_path / "store").as_uri(), warn=said.append
    )
    assert said == [
        f"the groups that huggingface:{tmp_path / 'hf'} names are not used: the images of a group stay in one split"
        " only with --set data.group=column, from the first ingest on"
    ]


def test_values_that_are_no_group_stop_the_ingest_if_groups_are_used(tmp_path, noise_images, run_ingest) -> None:
    parquet(tmp_path / "hf" / "a.parquet", list(noise_images), list(labels_of(noise_images)), groups=[{"id": 1}] * 60)
    rows = (json.dumps({"label": label, "group": {"id": 1}}).encode() for label in labels_of(noise_images))
    pairs = enumerate(zip(noise_images, rows, strict=True))
    tar(tmp_path / "wds" / "a.tar", [m for n, (i, row) in pairs for m in ((f"{n}.png", i), (f"{n}.json", row))])
    for kind, message in (
        ("hf", r"The column group in row 0 of a\.parquet contains {'id': 1}, .* \(its type is struct<id: int64>\)"),
        ("wds", r"The field group of a\.tar/0\.json contains {'id': 1}, .* \(its type is object\)"),
    ):
        source = f"{'huggingface' if kind == 'hf' else 'webdataset'}:{tmp_path / kind}"
        with pytest.raises(DataError, match=message):
            run_ingest(source, group="column")
        assert run_ingest(source).groups == 0


def test_reread_lists_an_unchanged_file_again(
    tmp_path, noise_images, run_ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evernear.data.sources.packed.file_etag", lambda stat: "always the same")
    path = tmp_path / "hf" / "a.parquet"
    parquet(path, list(noise_images), ["a", "b"] * 30)
    run_ingest(f"huggingface:{path.parent}")
    parquet(path, list(noise_images), ["a", "c"] * 30)
    assert run_ingest(f"huggingface:{path.parent}").labels == ("a", "b")
    assert run_ingest(f"huggingface:{path.parent}", reread=True).labels == ("a", "b", "c")


def test_broken_rows_are_named(tmp_path, noise_images, run_ingest) -> None:
    parquet(tmp_path / "hf" / "a.parquet", [*noise_images, b"no image", None], [*labels_of(noise_images), "1", "2"])
    manifest = run_ingest(f"huggingface:{tmp_path / 'hf'}")
    assert noted(manifest, "undecodable") == ["a.parquet/000000060", "a.parquet/000000061"]


def test_webdataset_metadata_and_litter(tmp_path, noise_images, run_ingest) -> None:
    members: list[Sample] = [("./._0.jpg", b"fork")]
    for number, image in enumerate(noise_images[:20]):
        label = json.dumps({"label": number % 2, "caption": "x"}).encode()
        members += [(f"./{number}.json", label), (f"./{number}.txt", b"a caption"), (f"./{number}.jpg", image)]
    tar(tmp_path / "wds" / "a.tar.gz", members, "w:gz")
    for _ in range(2):
        manifest = run_ingest(f"webdataset:{tmp_path / 'wds'}")
        assert manifest.labels == ("0", "1")
        assert sum(shard.count for shard in manifest.shards) == 20
        assert noted(manifest, "litter") == ["a.tar.gz/._0.jpg"]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            [("0.jpg", b"x")],
            r"The sample 0 of a\.tar has the members 0\.jpg, and none is the label of 0\.jpg: add 0\.cls",
        ),
        ([("0.jpg", b"x"), ("0.cls", b"\xff")], r"a\.tar/0\.cls is not UTF-8"),
        ([("0.jpg", b"x"), ("0.json", b"{")], r"a\.tar/0\.json is not JSON"),
        ([("0.jpg", b"x"), ("0.json", b"[" * 100_000)], r"a\.tar/0\.json is not JSON"),
        ([("0.jpg", b"x"), ("0.cls", b"1"), ("0.jpg", b"y")], r"contains two images called 0\.jpg"),
        (
            [("0.cls", b"1"), ("0.npy", b"x"), ("1.cls", b"1")],
            r"no image with a label in tars\. The sample 0 of a\.tar has the members 0\.cls, 0\.npy, and none is",
        ),
        (
            [("0.cls", b"1"), ("1.cls", b"1"), ("0.jpg", b"x"), ("1.jpg", b"x")],
            r"The members of the sample 0 of a\.tar are not adjacent, .* `tar --sort=name`",
        ),
        (
            [("0.cls", b"1"), ("0.jpg", b"x"), ("1.jpg", b"x"), ("2.cls", b"1"), ("2.jpg", b"x"), ("1.json", b"{}")],
            r"The members of the sample 1 of a\.tar are not adjacent",
        ),
        ([("\udcff.jpg", b"x"), ("\udcff.cls", b"1")], "is not UTF-8; rename it"),
    ],
)
def test_mistakes_in_tars_are_one_sentence(tmp_path, run_ingest, members: list[Sample], message: str) -> None:
    tar(tmp_path / "wds" / "a.tar", members)
    with pytest.raises(DataError, match=message):
        run_ingest(f"webdataset:{tmp_path / 'wds'}")


@pytest.mark.parametrize("cut", [1, 512, 700, 1024, 5000])
def test_truncated_tars_are_refused(tmp_path, noise_images, run_ingest, cut: int) -> None:
    write_tar(tmp_path / "wds" / "a", noise_images, labels_of(noise_images))
    path = tmp_path / "wds" / "a.tar"
    data = path.read_bytes().rstrip(b"\0")
    path.write_bytes(data[:-cut])
    with pytest.raises(DataError, match=r"a\.tar is (damaged|truncated|not a complete tar)"):
        run_ingest(f"webdataset:{tmp_path / 'wds'}")


def test_corrupt_compression_is_one_sentence(tmp_path, noise_images, run_ingest) -> None:
    write_tar(tmp_path / "wds" / "a", noise_images, labels_of(noise_images))
    path = tmp_path / "wds" / "a.tar"
    data = lzma.compress(path.read_bytes())
    for start in (0, len(data) // 2):
        path.write_bytes(data[:start] + b"\xff" * 16 + data[start + 16 :])
        with pytest.raises(DataError, match=r"a\.tar is not a complete tar \([^\n:]+\); write it again\.$"):
            run_ingest(f"webdataset:{tmp_path / 'wds'}")


def test_location_of_a_file_names_its_directory(tmp_path, noise_images, bucket: str) -> None:
    path = tmp_path / "wds" / "a.tar"
    tar(path, [("0.jpg", noise_images[0]), ("0.cls", b"1")])
    open_store(f"s3://{bucket}/wds").put("a.tar", path)
    for folder in (str(path.parent), f"s3://{bucket}/wds"):
        with pytest.raises(DataError, match=rf"/a\.tar is not a directory; name the one .* file, {folder}\."):
            [*open_source(f"webdataset:{folder}/a.tar", DataSettings()).entries()]
        (_,) = open_source(f"webdataset:{folder}", DataSettings()).entries()
        with pytest.raises(DataError, match=r"contains no Parquet or Arrow files .*\. It has a\.tar\."):
            [*open_source(f"huggingface:{folder}", DataSettings()).entries()]


def test_mistakes_in_tables_are_one_sentence(tmp_path, noise_images, run_ingest) -> None:
    root = tmp_path / "hf"
    root.mkdir()
    pq.write_table(pa.table({"picture": noise_images[:2], "class": ["a", "b"]}), root / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet has no column label, or several; its columns: picture, class"):
        run_ingest(f"huggingface:{root}")
    pq.write_table(pa.table({"path": ["a.png"], "label": ["a"]}), root / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet has no column image, with the bytes of an image"):
        run_ingest(f"huggingface:{root}")
    (root / "a.parquet").write_bytes(b"PAR1 truncated")
    with pytest.raises(DataError, match=r"a\.parquet is not a valid Parquet or Arrow file"):
        run_ingest(f"huggingface:{root}")
    (root / "a.parquet").unlink()
    with pytest.raises(DataError, match=r"contains no Parquet or Arrow files \(\.parquet, \.arrow\)"):
        run_ingest(f"huggingface:{root}")
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    paths = pa.array([{"bytes": None, "path": "/home/me/a.png"}] * 2, kind)
    pq.write_table(pa.table({"image": paths, "label": ["a", "b"]}), root / "a.parquet")
    with pytest.raises(DataError, match=r"names the file /home/me/a\.png instead of containing it"):
        run_ingest(f"huggingface:{root}")


def test_labels_of_packed_files_cannot_be_written(tmp_path, noise_images) -> None:
    write_tar(tmp_path / "wds" / "a", noise_images, labels_of(noise_images))
    with pytest.raises(SettingsError, match="Labels cannot be written to webdataset:"):
        open_label_target(f"webdataset:{tmp_path / 'wds'}")
