"""Malicious and damaged archives."""

import io
import json
import pickle
import random
import re
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evernear.common.disk import sha256_bytes
from evernear.embedding import export
from evernear.errors import IntegrityError
from evernear.release.archive_reader import open_parts, open_release, read_part, read_release, read_release_manifest
from evernear.release.manifest import NETWORK_DESCRIPTION_FILE, NETWORK_FILE
from tests.no_files import NO_FILES
from tests.releases import MakeRelease, PackedRelease, forge

TORCHSERVE = "MAR-INF/MANIFEST.json"


@pytest.fixture(scope="module")
def packed(make_release: MakeRelease) -> PackedRelease:
    return make_release()


def rewrite(packed: PackedRelease, path: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """Rewrite the archive with changed members."""
    with zipfile.ZipFile(packed.archive) as members:
        content = {name: members.read(name) for name in members.namelist()}
    change(content)
    with zipfile.ZipFile(path, "w") as members:
        for name, data in content.items():
            members.writestr(name, data)
    return path


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
    packed: PackedRelease, tmp_path: Path, change: Callable[[dict[str, bytes]], None], sentence: str
) -> None:
    archive = rewrite(packed, tmp_path / "tampered.mar", change)
    with pytest.raises(IntegrityError, match=sentence):
        open_release(archive, tmp_path / "deep" / "opened")
    assert not (tmp_path / "deep" / "opened").exists()
    assert {p.name for p in tmp_path.iterdir()} <= {"tampered.mar", "deep"}


@pytest.mark.parametrize("name", ["manifest.json", "handler.py", TORCHSERVE])
def test_duplicate_member_is_rejected(packed: PackedRelease, tmp_path: Path, name: str) -> None:
    archive = rewrite(packed, tmp_path / "twice.mar", lambda _: None)
    with zipfile.ZipFile(archive, "a") as members, pytest.warns(UserWarning, match="Duplicate name"):
        members.writestr(name, members.read(name))
    with pytest.raises(IntegrityError, match="a duplicate name"):
        open_release(archive, tmp_path / "opened")


def test_symbolic_link_is_rejected(packed: PackedRelease, tmp_path: Path) -> None:
    archive = rewrite(packed, tmp_path / "link.mar", lambda content: content.pop("handler.py"))
    with zipfile.ZipFile(archive, "a") as members:
        link = zipfile.ZipInfo("handler.py")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        members.writestr(link, "/etc/passwd")
    with pytest.raises(IntegrityError, match="not a plain file"):
        open_release(archive, tmp_path / "opened")


def test_decompression_bomb_is_not_unpacked(packed: PackedRelease, tmp_path: Path) -> None:
    """Self-consistent: the manifest names the bomb, its true size and its true hash."""
    zeros = bytes(64 * 2**20)
    bomb = forge(packed, tmp_path / "plain.mar", network_pt=zeros).archive
    with (
        zipfile.ZipFile(bomb) as old,
        zipfile.ZipFile(tmp_path / "bomb.mar", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            kind = zipfile.ZIP_DEFLATED if name == "network.pt" else zipfile.ZIP_STORED
            new.writestr(name, old.read(name), compress_type=kind)
    assert (tmp_path / "bomb.mar").stat().st_size < len(zeros) / 50
    with pytest.raises(IntegrityError, match=r"network\.pt in .* is compressed or encrypted"):
        open_release(tmp_path / "bomb.mar", tmp_path / "opened")
    assert not (tmp_path / "opened").exists()


def patch_directory(archive: Path, name: str, change: Callable[[bytearray, int], None]) -> Path:
    """Edit a member's entry in the central directory; ``change`` receives the file's bytes and the
    entry's offset."""
    content = bytearray(archive.read_bytes())
    entry = content.rindex(name.encode()) - 46
    assert content[entry : entry + 4] == b"PK\x01\x02"
    change(content, entry)
    archive.write_bytes(content)
    return archive


@pytest.mark.parametrize("size", [0, 5, 2**31])
def test_wrong_member_size_is_rejected(packed: PackedRelease, tmp_path: Path, size: int) -> None:
    archive = rewrite(packed, tmp_path / "lying.mar", lambda _: None)

    def falsify(content: bytearray, entry: int) -> None:
        content[entry + 20 : entry + 28] = size.to_bytes(4, "little") * 2  # compressed and plain

    patch_directory(archive, "smoke.json", falsify)
    with pytest.raises(IntegrityError, match=r"smoke\.json in .* is missing or does not match the manifest"):
        open_release(archive, tmp_path / "opened")


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, 99])
@pytest.mark.parametrize("name", ["manifest.json", TORCHSERVE, "verdict.json"])
def test_compressed_member_is_rejected(packed: PackedRelease, tmp_path: Path, name: str, kind: int) -> None:
    """The data is not valid for that compression, so decompressing it would raise another error."""
    archive = rewrite(packed, tmp_path / "odd.mar", lambda _: None)

    def falsify(content: bytearray, entry: int) -> None:
        content[entry + 10 : entry + 12] = kind.to_bytes(2, "little")

    patch_directory(archive, name, falsify)
    with pytest.raises(IntegrityError, match="is compressed or encrypted"):
        open_release(archive, tmp_path / "opened")


def test_overlapping_members_are_rejected(packed: PackedRelease, tmp_path: Path) -> None:
    """Two names share one uncompressed content, so the archive expands (Fifield 2019, "A better zip
    bomb")."""
    with zipfile.ZipFile(packed.archive) as members:
        network = members.read("network.pt")
    bomb = forge(packed, tmp_path / "overlap.mar", index_faiss=network, labels_npy=network, centroids_npy=network)
    with zipfile.ZipFile(bomb.archive) as members:
        others = {name: members.read(name) for name in members.namelist() if not name.endswith((".faiss", ".npy"))}
    with zipfile.ZipFile(tmp_path / "overlap.mar", "w") as new:
        for name, data in others.items():
            new.writestr(name, data)
        original = new.getinfo("network.pt")
        for name in ("index.faiss", "labels.npy", "centroids.npy"):
            info = zipfile.ZipInfo(name)
            info.header_offset, info.CRC = original.header_offset, original.CRC
            info.file_size = info.compress_size = original.file_size
            new.filelist.append(info)
            new.NameToInfo[name] = info
    with pytest.raises(IntegrityError, match="one after another"):
        open_release(tmp_path / "overlap.mar", tmp_path / "opened")


def unlisted(name: str, data: bytes) -> bytes:
    """A member of a zip file without its entry in the central directory."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as members:
        members.writestr(name, data)
    return buffer.getvalue()[: members.start_dir]


@pytest.mark.parametrize("place", ["before", "behind"])
def test_member_visible_only_to_torchserve_is_rejected(packed: PackedRelease, tmp_path: Path, place: str) -> None:
    """Java's ZipInputStream follows local headers: TorchServe ran such a handler instead of the
    real one."""
    content = packed.archive.read_bytes()
    with zipfile.ZipFile(packed.archive) as members:
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
    with pytest.raises(IntegrityError, match="its listed members only"):
        open_release(tmp_path / "hidden.mar", tmp_path / "opened")


def test_member_that_ends_early_for_torchserve_is_rejected(packed: PackedRelease, tmp_path: Path) -> None:
    """The rest of its content could be an unlisted member."""
    archive = rewrite(packed, tmp_path / "short.mar", lambda _: None)
    content = bytearray(archive.read_bytes())
    with zipfile.ZipFile(archive) as members:
        header = members.getinfo("smoke.json").header_offset
    content[header + 18 : header + 26] = (7).to_bytes(4, "little") * 2
    archive.write_bytes(content)
    with pytest.raises(IntegrityError, match="one after another"):
        open_release(archive, tmp_path / "opened")


def test_member_header_with_extra_field_sizes_opens(packed: PackedRelease, tmp_path: Path) -> None:
    """Members over 2 GB store their sizes in an extra field; smaller members may also do so."""
    with zipfile.ZipFile(packed.archive) as old, zipfile.ZipFile(tmp_path / "large.mar", "w") as new:
        for name in old.namelist():
            with new.open(name, "w", force_zip64=True) as member:
                member.write(old.read(name))
    assert open_release(tmp_path / "large.mar", tmp_path / "opened").manifest == packed.manifest


def test_excessive_member_count_is_rejected_before_listing(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "many.mar", "w") as members:
        for number in range(80):
            members.writestr(f"{number}", b"")
            members.filelist[-1].comment = bytes(60_000)
    with pytest.raises(IntegrityError, match="list of members"):
        open_release(tmp_path / "many.mar", tmp_path / "opened")


def test_zip64_archive_opens(packed: PackedRelease, tmp_path: Path) -> None:
    """Archives over 4 GB have zip64 records; smaller archives may also have them."""
    original = packed.archive.read_bytes()
    with zipfile.ZipFile(packed.archive) as members:
        count, start = len(members.namelist()), members.start_dir
    end = len(original) - 22
    zip64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, end - start, start)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
    (tmp_path / "large.mar").write_bytes(original[:end] + zip64 + locator + original[end:])
    assert open_release(tmp_path / "large.mar", tmp_path / "opened").manifest == packed.manifest


@pytest.mark.parametrize("name", ["network.pt", "verdict.json"])
def test_manifest_that_mismatches_its_parts_is_rejected(packed: PackedRelease, tmp_path: Path, name: str) -> None:
    """The network matches its hash, but the index belongs to another network."""

    def swap(content: dict[str, bytes]) -> None:
        content[name] += b" "
        manifest = json.loads(content["manifest.json"])
        manifest["parts"][name] = {"sha256": sha256_bytes(content[name]), "size_bytes": len(content[name])}
        content["manifest.json"] = json.dumps(manifest).encode()

    archive = rewrite(packed, tmp_path / "swapped.mar", swap)
    with pytest.raises(IntegrityError, match=rf"{re.escape(name)} has the sha256 .*, but should have"):
        open_release(archive, tmp_path / "opened")


def test_unknown_part_is_rejected_even_if_the_manifest_names_it(packed: PackedRelease, tmp_path: Path) -> None:
    def add(content: dict[str, bytes]) -> None:
        content["weights.pkl"] = pickle.dumps(print)
        manifest = json.loads(content["manifest.json"])
        part = {"sha256": sha256_bytes(content["weights.pkl"]), "size_bytes": len(content["weights.pkl"])}
        manifest["parts"]["weights.pkl"] = part
        content["manifest.json"] = json.dumps(manifest).encode()

    with pytest.raises(IntegrityError, match=r"parts are missing or unknown: weights\.pkl"):
        open_release(rewrite(packed, tmp_path / "extra.mar", add), tmp_path / "opened")


@pytest.mark.parametrize("name", ["manifest.json", TORCHSERVE])
def test_deeply_nested_json_is_rejected(packed: PackedRelease, tmp_path: Path, name: str) -> None:
    archive = rewrite(packed, tmp_path / "deep.mar", set_member(name, b"[" * 10**6))
    with pytest.raises(IntegrityError, match=r"is not a valid release manifest|does not describe"):
        open_release(archive, tmp_path / "opened")


def test_hostile_name_cannot_inject_terminal_escapes(packed: PackedRelease, tmp_path: Path) -> None:
    for change in (set_member("\x1b[2Jx", b""), edit_manifest(lambda m: m.update({"\x1b[2Jx": 1}))):
        with pytest.raises(IntegrityError) as exc_info:
            open_release(rewrite(packed, tmp_path / "odd.mar", change), tmp_path / "opened")
        assert str(exc_info.value).isprintable()


def test_part_names_match_their_writers() -> None:
    assert (NETWORK_FILE, NETWORK_DESCRIPTION_FILE) == (export.NETWORK_FILE, export.DESCRIPTION_FILE)


def test_total_size_is_bounded(packed: PackedRelease, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="unpacks to more than 1000 bytes"):
        open_release(packed.archive, tmp_path / "opened", max_size_bytes=1000)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x05\x06" + bytes(18)])
def test_invalid_archive_is_rejected(tmp_path: Path, content: bytes) -> None:
    archive = tmp_path / "x.mar"
    archive.write_bytes(content)
    with pytest.raises(IntegrityError):
        open_release(archive, tmp_path / "opened")


def test_missing_archive_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="cannot be read as a release"):
        open_release(tmp_path / "absent.mar", tmp_path / "opened")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_damaged_byte_is_detected(
    packed: PackedRelease, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(packed.archive.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    directory = tmp_path_factory.mktemp("damaged")
    (directory / "x.mar").write_bytes(content)
    try:
        parts = open_release(directory / "x.mar", directory / "opened")
    except IntegrityError:
        assert not (directory / "opened").exists()
    else:  # a date or an attribute of the zip entry, which does not affect the content
        assert parts.manifest == packed.manifest
        open_parts(parts.directory)


def test_truncated_archive_is_rejected(packed: PackedRelease, tmp_path: Path) -> None:
    content = packed.archive.read_bytes()
    for length in random.Random(0).sample(range(len(content)), 30):
        (tmp_path / "x.mar").write_bytes(content[:length])
        with pytest.raises(IntegrityError):
            open_release(tmp_path / "x.mar", tmp_path / "opened")


def test_unpacked_parts_are_verified_on_load(packed: PackedRelease, tmp_path: Path) -> None:
    parts = open_release(packed.archive, tmp_path / "opened")
    network = parts.directory / "network.pt"
    network.write_bytes(network.read_bytes()[:-1] + b"x")
    with pytest.raises(IntegrityError, match=r"network\.pt"):
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
