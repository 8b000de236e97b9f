"""Malicious and damaged archives."""

import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evernear.common.disk import sha256_bytes
from evernear.errors import IntegrityError
from evernear.release.archive_reader import open_parts, open_release, read_part, read_release, read_release_manifest
from tests.no_files import NO_FILES
from tests.releases import PackedRelease, forge

TORCHSERVE = "MAR-INF/MANIFEST.json"


def rewrite(packed: PackedRelease, path: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """Rewrite the archive with changed members."""
    with zipfile.ZipFile(packed.archive) as members:
        content = {name: members.read(name) for name in members.namelist()}
    change(content)
    with zipfile.ZipFile(path, "w") as members:
        for name, data in content.items():
            members.writestr(name, data)
    return path


def assert_rejected(archive: Path, sentence: str) -> None:
    with pytest.raises(IntegrityError, match=sentence) as rejected:
        open_release(archive, archive.with_name("opened"))
    assert str(rejected.value).isprintable()
    assert {path.name for path in archive.parent.iterdir()} <= {archive.name}


def set_member(name: str, data: bytes) -> Callable[[dict[str, bytes]], None]:
    return lambda content: content.update({name: data})


def edit_torchserve(key: str, value: str) -> Callable[[dict[str, bytes]], None]:
    def change(content: dict[str, bytes]) -> None:
        archive_manifest = json.loads(content[TORCHSERVE])
        archive_manifest["model"][key] = value
        content[TORCHSERVE] = json.dumps(archive_manifest).encode()

    return change


def edit_manifest(change: Callable[[dict], None]) -> Callable[[dict[str, bytes]], None]:
    def rewrite(content: dict[str, bytes]) -> None:
        manifest = json.loads(content["manifest.json"])
        change(manifest)
        content["manifest.json"] = json.dumps(manifest).encode()

    return rewrite


def append_to_part(name: str) -> Callable[[dict[str, bytes]], None]:
    """Append to a part, or add one, and describe it in the manifest."""

    def change(content: dict[str, bytes]) -> None:
        content[name] = content.get(name, b"") + b" "
        part = {"sha256": sha256_bytes(content[name]), "size_bytes": len(content[name])}
        edit_manifest(lambda manifest: manifest["parts"].update({name: part}))(content)

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (set_member("../escaped.txt", b"out"), "does not contain the files that its manifest names: ../escaped.txt"),
        (set_member("/tmp/escaped.txt", b"out"), "does not contain the files that its manifest names"),
        (set_member("evil.py", b"import os"), "does not contain the files that its manifest names: evil.py"),
        (set_member("requirements.txt", b"evil"), "does not contain the files that its manifest names"),
        (lambda content: content.pop("index.faiss"), "does not contain the files that its manifest names: index.faiss"),
        (lambda content: content.pop("manifest.json"), "is not a release: manifest.json is missing"),
        (set_member("handler.py", b"import os"), "handler.py in .* is missing or does not match the manifest"),
        (edit_torchserve("handler", "evil.py"), "does not describe"),
        (edit_torchserve("modelVersion", "9"), "does not describe"),
        (edit_torchserve("requirementsFile", "requirements.txt"), "does not describe"),
        (edit_torchserve("configFile", "evil.yaml"), "does not describe"),
        (set_member(TORCHSERVE, b"[]"), "does not describe"),
        (set_member(TORCHSERVE, b"[" * 10**6), "does not describe"),
        (set_member("manifest.json", b"[" * 10**6), "not a valid release manifest"),
        (set_member("\x1b[2Jx", b""), "does not contain the files that its manifest names"),
        (edit_manifest(lambda m: m.update({"\x1b[2Jx": 1})), "does not know the field"),
        (append_to_part("network.pt"), r"network\.pt has the sha256 .*, but should have"),
        (append_to_part("verdict.json"), r"verdict\.json has the sha256 .*, but should have"),
        (append_to_part("weights.pkl"), r"parts are missing or unknown: weights\.pkl"),
        (set_member("manifest.json", b" " * (5 * 2**20)), "larger than"),
        (
            edit_manifest(lambda m: m["parts"].update({"../x": m["parts"]["smoke.json"]})),
            "not a valid release manifest",
        ),
        (edit_manifest(lambda m: m.update(version="../../x")), "not a valid release manifest: version"),
        (
            edit_manifest(lambda m: m.update(unknown=1)),
            "for this version of evernear, which does not know the field unknown",
        ),
    ],
)
def test_tampered_archive_is_rejected_and_leaves_no_files(
    release: PackedRelease, tmp_path: Path, change: Callable[[dict[str, bytes]], None], sentence: str
) -> None:
    assert_rejected(rewrite(release, tmp_path / "tampered.mar", change), sentence)


@pytest.mark.parametrize("name", ["manifest.json", "handler.py", TORCHSERVE])
def test_duplicate_member_is_rejected(release: PackedRelease, tmp_path: Path, name: str) -> None:
    archive = rewrite(release, tmp_path / "twice.mar", lambda _: None)
    with zipfile.ZipFile(archive, "a") as members, pytest.warns(UserWarning, match="Duplicate name"):
        members.writestr(name, members.read(name))
    assert_rejected(archive, "a duplicate name")


SIZES, COMPRESSION = slice(20, 28), slice(10, 12)
"""Fields of an entry in the central directory: two sizes, and the method of compression."""


@pytest.mark.parametrize(
    ("name", "field", "value", "sentence"),
    [
        *(
            ("smoke.json", SIZES, size.to_bytes(4, "little") * 2, r"smoke\.json in .* is missing or does not match")
            for size in (0, 5, 2**31)
        ),
        *(
            (name, COMPRESSION, kind.to_bytes(2, "little"), "is compressed or encrypted")
            for kind in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, 99)
            for name in ("manifest.json", TORCHSERVE, "verdict.json")
        ),
    ],
)
def test_wrong_size_and_compressed_member_are_rejected(
    release: PackedRelease, tmp_path: Path, name: str, field: slice, value: bytes, sentence: str
) -> None:
    """The data is not valid for the compression, so decompressing it would raise another error."""
    archive = rewrite(release, tmp_path / "lying.mar", lambda _: None)
    content = bytearray(archive.read_bytes())
    entry = content.rindex(name.encode()) - 46
    assert content[entry : entry + 4] == b"PK\x01\x02"
    content[entry + field.start : entry + field.stop] = value
    archive.write_bytes(content)
    assert_rejected(archive, sentence)


def test_overlapping_members_are_rejected(release: PackedRelease, tmp_path: Path) -> None:
    """Two names share one uncompressed content, so the archive expands (Fifield 2019, "A better zip
    bomb")."""
    with zipfile.ZipFile(release.archive) as members:
        network = members.read("network.pt")
    bomb = forge(release, tmp_path / "overlap.mar", index_faiss=network, labels_npy=network)
    with zipfile.ZipFile(bomb.archive) as members:
        others = {name: members.read(name) for name in members.namelist() if not name.endswith((".faiss", ".npy"))}
    with zipfile.ZipFile(tmp_path / "overlap.mar", "w") as new:
        for name, data in others.items():
            new.writestr(name, data)
        original = new.getinfo("network.pt")
        for name in ("index.faiss", "labels.npy"):
            info = zipfile.ZipInfo(name)
            info.header_offset, info.CRC = original.header_offset, original.CRC
            info.file_size = info.compress_size = original.file_size
            new.filelist.append(info)
            new.NameToInfo[name] = info
    assert_rejected(tmp_path / "overlap.mar", "one after another")


def unlisted(name: str, data: bytes) -> bytes:
    """A member of a zip file without its entry in the central directory."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as members:
        members.writestr(name, data)
    return buffer.getvalue()[: members.start_dir]


@pytest.mark.parametrize("place", ["before", "behind"])
def test_member_visible_only_to_torchserve_is_rejected(release: PackedRelease, tmp_path: Path, place: str) -> None:
    """Java's ZipInputStream follows local headers: TorchServe ran such a handler instead of the
    real one."""
    content = release.archive.read_bytes()
    with zipfile.ZipFile(release.archive) as members:
        start = members.start_dir
    hidden = unlisted("handler.py", b"import os")
    if place == "before":  # data before a zip file shifts its offsets, which `zipfile` compensates for
        content = hidden + content
    else:
        end = content[-22:-6] + (start + len(hidden)).to_bytes(4, "little") + content[-2:]
        content = content[:start] + hidden + content[start:-22] + end
    (tmp_path / "hidden.mar").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "hidden.mar") as members:
        assert members.testzip() is None
    assert_rejected(tmp_path / "hidden.mar", "its listed members only")


def test_member_that_ends_early_for_torchserve_is_rejected(release: PackedRelease, tmp_path: Path) -> None:
    """The rest of its content could be an unlisted member."""
    archive = rewrite(release, tmp_path / "short.mar", lambda _: None)
    content = bytearray(archive.read_bytes())
    with zipfile.ZipFile(archive) as members:
        header = members.getinfo("smoke.json").header_offset
    content[header + 18 : header + 26] = (7).to_bytes(4, "little") * 2
    archive.write_bytes(content)
    assert_rejected(archive, "one after another")


def test_member_header_with_extra_field_sizes_opens(release: PackedRelease, tmp_path: Path) -> None:
    """Members over 2 GB store their sizes in an extra field; smaller members may also do so."""
    with zipfile.ZipFile(release.archive) as old, zipfile.ZipFile(tmp_path / "large.mar", "w") as new:
        for name in old.namelist():
            with new.open(name, "w", force_zip64=True) as member:
                member.write(old.read(name))
    assert open_release(tmp_path / "large.mar", tmp_path / "opened").manifest == release.manifest


def test_excessive_member_count_is_rejected_before_listing(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "many.mar", "w") as members:
        for number in range(80):
            members.writestr(f"{number}", b"")
            members.filelist[-1].comment = bytes(60_000)
    assert_rejected(tmp_path / "many.mar", "list of members")


def test_zip64_archive_opens(release: PackedRelease, tmp_path: Path) -> None:
    """Archives over 4 GB have zip64 records; smaller archives may also have them."""
    original = release.archive.read_bytes()
    with zipfile.ZipFile(release.archive) as members:
        count, start = len(members.namelist()), members.start_dir
    end = len(original) - 22
    zip64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, end - start, start)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
    (tmp_path / "large.mar").write_bytes(original[:end] + zip64 + locator + original[end:])
    assert open_release(tmp_path / "large.mar", tmp_path / "opened").manifest == release.manifest


def test_total_size_is_bounded(release: PackedRelease, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="unpacks to more than 1000 bytes"):
        open_release(release.archive, tmp_path / "opened", max_size_bytes=1000)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_damaged_byte_is_detected(
    release: PackedRelease, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(release.archive.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    directory = tmp_path_factory.mktemp("damaged")
    (directory / "x.mar").write_bytes(content)
    try:
        parts = open_release(directory / "x.mar", directory / "opened")
    except IntegrityError:
        assert not (directory / "opened").exists()
    else:  # a date or an attribute of the zip entry, which does not affect the content
        assert parts.manifest == release.manifest
        open_parts(parts.directory)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", NO_FILES)
@pytest.mark.parametrize("read", [open_release, read_release, read_part, read_release_manifest, open_parts])
def test_special_file_is_not_a_release(
    tmp_path: Path, make: Callable[[Path], None], read: Callable[..., object]
) -> None:
    make(tmp_path / "x.mar")
    more = {open_release: [tmp_path / "opened"], read_part: ["network.pt"]}.get(read, [])
    with pytest.raises(IntegrityError, match=r"x\.mar (cannot be read as a release|is not a release)"):
        read(tmp_path / "x.mar", *more)
    assert not (tmp_path / "opened").exists()
