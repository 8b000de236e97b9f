"""Archives that somebody made to do harm, or that a disk damaged."""

import json
import random
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from releases import MakeRelease, PackedRelease

from evernear.errors import IntegrityError
from evernear.release.parts import open_parts, open_release

TORCHSERVE = "MAR-INF/MANIFEST.json"


@pytest.fixture(scope="module")
def packed(make_release: MakeRelease) -> PackedRelease:
    return make_release()


def rewrite(packed: PackedRelease, path: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """The same archive with other members."""
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
        told = json.loads(content[TORCHSERVE])
        told["model"][key] = value
        content[TORCHSERVE] = json.dumps(told).encode()

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
        (set_member("../escaped.txt", b"out"), "does not hold what its manifest names: ../escaped.txt"),
        (set_member("/tmp/escaped.txt", b"out"), "does not hold what its manifest names"),
        (set_member("evil.py", b"import os"), "does not hold what its manifest names: evil.py"),
        (set_member("requirements.txt", b"evil"), "does not hold what its manifest names"),
        (lambda content: content.pop("index.faiss"), "does not hold what its manifest names: index.faiss"),
        (lambda content: content.pop("manifest.json"), "holds no manifest.json"),
        (set_member("handler.py", b"import os"), "handler.py in .* is missing or not the file"),
        (edit_torchserve("handler", "evil.py"), "does not describe"),
        (edit_torchserve("modelVersion", "9"), "does not describe"),
        (edit_torchserve("requirementsFile", "requirements.txt"), "does not describe"),
        (edit_torchserve("configFile", "model-config.yaml"), "does not describe"),
        (set_member(TORCHSERVE, b"[]"), "does not describe"),
        (set_member("manifest.json", b" " * (5 * 2**20)), "larger than"),
        (
            edit_manifest(lambda m: m["parts"].update({"../x": m["parts"]["smoke.json"]})),
            "no release manifest",
        ),
        (edit_manifest(lambda m: m.update(version="../../x")), "no release manifest: version"),
        (edit_manifest(lambda m: m.update(unknown=1)), "no release manifest: unknown"),
    ],
)
def test_a_tampered_archive_is_refused_and_leaves_nothing(
    packed: PackedRelease, tmp_path: Path, change: Callable[[dict[str, bytes]], None], sentence: str
) -> None:
    archive = rewrite(packed, tmp_path / "tampered.mar", change)
    with pytest.raises(IntegrityError, match=sentence):
        open_release(archive, tmp_path / "deep" / "opened")
    assert not (tmp_path / "deep" / "opened").exists()
    assert {p.name for p in tmp_path.iterdir()} <= {"tampered.mar", "deep"}


@pytest.mark.parametrize("name", ["manifest.json", "handler.py", TORCHSERVE])
def test_a_member_that_is_there_twice_is_refused(packed: PackedRelease, tmp_path: Path, name: str) -> None:
    archive = rewrite(packed, tmp_path / "twice.mar", lambda _: None)
    with zipfile.ZipFile(archive, "a") as members, pytest.warns(UserWarning, match="Duplicate name"):
        members.writestr(name, members.read(name))
    with pytest.raises(IntegrityError, match="a name twice"):
        open_release(archive, tmp_path / "opened")


def test_a_symbolic_link_is_refused(packed: PackedRelease, tmp_path: Path) -> None:
    archive = rewrite(packed, tmp_path / "link.mar", lambda content: content.pop("handler.py"))
    with zipfile.ZipFile(archive, "a") as members:
        link = zipfile.ZipInfo("handler.py")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        members.writestr(link, "/etc/passwd")
    with pytest.raises(IntegrityError, match="not a plain file"):
        open_release(archive, tmp_path / "opened")


def test_a_part_larger_than_said_is_not_unpacked(packed: PackedRelease, tmp_path: Path) -> None:
    """A decompression bomb: the member holds a gigabyte of zeros."""
    archive = tmp_path / "bomb.mar"
    with zipfile.ZipFile(packed.archive) as old, zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            if name != "network.pt":
                new.writestr(name, old.read(name))
        with new.open("network.pt", "w") as bomb:
            for _ in range(64):
                bomb.write(bytes(2**20))
    with pytest.raises(IntegrityError, match=r"network\.pt in .* is missing or not the file"):
        open_release(archive, tmp_path / "opened")


def test_the_whole_is_bounded(packed: PackedRelease, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="unpacks to more than 1000 bytes"):
        open_release(packed.archive, tmp_path / "opened", max_size_bytes=1000)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x05\x06" + bytes(18)])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    archive = tmp_path / "x.mar"
    archive.write_bytes(content)
    with pytest.raises(IntegrityError):
        open_release(archive, tmp_path / "opened")


def test_an_absent_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="cannot be read as a release"):
        open_release(tmp_path / "absent.mar", tmp_path / "opened")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_damaged_byte_goes_unnoticed(
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
    else:  # a date or an attribute of the zip itself: what comes out is what went in
        assert parts.manifest == packed.manifest
        open_parts(parts.directory)


def test_a_truncated_archive_is_refused_wherever_it_ends(packed: PackedRelease, tmp_path: Path) -> None:
    content = packed.archive.read_bytes()
    for length in random.Random(0).sample(range(len(content)), 30):
        (tmp_path / "x.mar").write_bytes(content[:length])
        with pytest.raises(IntegrityError):
            open_release(tmp_path / "x.mar", tmp_path / "opened")


def test_unpacked_parts_are_checked_again_when_they_are_loaded(packed: PackedRelease, tmp_path: Path) -> None:
    parts = open_release(packed.archive, tmp_path / "opened")
    network = parts.directory / "network.pt"
    network.write_bytes(network.read_bytes()[:-1] + b"x")
    with pytest.raises(IntegrityError, match=r"network\.pt"):
        open_parts(parts.directory)
