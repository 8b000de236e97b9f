"""`evernear inspect` on valid, damaged and malicious releases."""

import json
import pickle
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evernear.common.disk import sha256_bytes
from evernear.embedding import OPENVINO_FILES
from evernear.errors import DataError
from evernear.index.description import describe_index
from evernear.release.registry import Registry
from tests import command_line
from tests.no_files import NO_FILES
from tests.releases import PackedRelease, System, forge


@pytest.fixture(scope="module")
def image(release: PackedRelease, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "query.png"
    with zipfile.ZipFile(release.archive) as members:
        path.write_bytes(members.read("smoke-00.png"))
    return path


def evernear(*arguments: object, store: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return command_line.evernear(*arguments, environment={"EVERNEAR_STORE": store or "file:///nowhere/at/all"}, cwd=cwd)


def error_of(completed: subprocess.CompletedProcess[str], exit_code: int) -> str:
    """Check that the command failed with one line on stderr and an empty stdout; return the
    line."""
    assert completed.returncode == exit_code, completed.stderr
    assert completed.stdout == ""
    assert completed.stderr.startswith("evernear: ")
    assert completed.stderr.count("\n") == 1
    return completed.stderr


def test_show_prints_signature_and_lineage(release: PackedRelease, system: System) -> None:
    output = json.loads(evernear("registry", "show", release.archive, "--json").stdout)
    manifest, index = release.manifest, describe_index(system.index_dir)
    assert output["version"] == release.version
    assert output["network"]["inputs"] == [
        {"name": "images", "dtype": "uint8", "shape": ["N", 1, 8, 8], "meaning": "0 to 255, NCHW"}
    ]
    assert output["network"]["outputs"][0]["shape"] == ["N", manifest.embedding_dim]
    outputs = {value["name"]: (value["dtype"], value["shape"]) for value in output["request"]["outputs"]}
    assert outputs["neighbors.dist"] == ("float", [index.k])
    neighbors = {"neighbors.label", "neighbors.dist", "neighbors.row"}
    assert set(outputs) == {"pred", "dist", "unknown", "version", "id", *neighbors}
    assert output["index"].items() >= {"factory": "Flat", "size": index.size, "metric": index.metric}.items()
    assert output["labels"] == list(manifest.labels)
    assert output["preprocessing"] == manifest.preprocessing.model_dump(mode="json")
    assert output["metrics"] == manifest.metrics
    assert output["verdict"] == {"promote": True, "reasons": ["A test says so."]}
    assert output["lineage"]["dataset_digest"] == system.dataset.digest
    assert output["lineage"]["source"] == "digits"
    assert (output["training"]["epochs"], output["training"]["width"]) == (4, 4)
    assert output["lineage"]["git_commit"] == manifest.git_commit
    assert output["lineage"]["own_handler"] is True

    text = evernear("registry", "show", release.archive).stdout
    assert re.search(r"\ntraining settings\n(  .+\n)*  epochs +4\n", text)
    assert re.search("chosen because exact search of [0-9]+ kB is fast enough", text)
    for word in (release.version, system.dataset.digest, manifest.network_sha256, "uint8", "Flat", "A test says so."):
        assert word in text


def test_show_imports_neither_torch_nor_faiss_and_leaves_no_files(release: PackedRelease, tmp_path: Path) -> None:
    script = (
        "import sys; from evernear.release.records import describe; from pathlib import Path;"
        "from evernear.serving import HANDLER;"
        f"describe(Path({str(release.archive)!r}), HANDLER); print({{'torch', 'faiss', 'scipy'}} & set(sys.modules))"
    )
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert completed.stdout == "set()\n", completed.stderr
    assert list(tmp_path.iterdir()) == []


def test_archive_needs_no_working_directory(release: PackedRelease, tmp_path: Path) -> None:
    shown = command_line.evernear("registry", "show", release.archive, cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    run = command_line.evernear("inspect", "run", release.archive, "--image", "x", cwd=tmp_path)
    assert "is not in the registry" in error_of(run, 3)
    absent = command_line.evernear("registry", "show", release.version, cwd=tmp_path)
    assert "The working directory evernear-work does not exist" in error_of(absent, 2)
    assert list(tmp_path.iterdir()) == []


def test_run_reproduces_the_stored_answers(
    release: PackedRelease, registry: Registry, image: Path, tmp_path: Path
) -> None:
    registry.publish(release.archive)
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    with zipfile.ZipFile(release.archive) as members:
        stored = json.loads(members.read("smoke.json"))[0]
    for named in (release.archive, release.version):  # as a file and from the registry
        words = ("inspect", "run", named, "--image", image, broken, "--json")
        completed = evernear(*words, store=registry.uri, cwd=tmp_path)
        assert completed.returncode == 3, completed.stderr
        good, bad = (json.loads(line) for line in completed.stdout.splitlines())
        assert (good["pred"], good["unknown"], good["version"]) == (stored["pred"], stored["unknown"], release.version)
        assert good["dist"] == pytest.approx(stored["dist"], abs=1e-3)
        assert bad == {"image": str(broken), "error": "The image is not a PNG, JPEG, WebP or HEIC image."}


def hostile(packed: PackedRelease, path: Path, marker: Path) -> PackedRelease:
    """A release with valid hashes whose network (a pickle) and handler create the file ``proof`` if
    they are run."""

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (marker,)

    handler = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n".encode()
    network = pickle.dumps(Payload())
    with zipfile.ZipFile(packed.archive) as members:
        described = json.loads(members.read("network.json"))
    described |= {"sha256": sha256_bytes(network), "openvino": None}  # TorchScript runs this network
    forged = {"network_pt": network, "network_json": json.dumps(described).encode(), "handler_py": handler}
    return forge(packed, path, OPENVINO_FILES, **forged)


def restamp(release: PackedRelease, path: Path) -> PackedRelease:
    """``release`` with index and verdict restamped for its new network, so that everything is
    consistent."""
    network = release.manifest.network_sha256
    with zipfile.ZipFile(release.archive) as members:
        index, verdict = (json.loads(members.read(name)) for name in ("index.json", "verdict.json"))
    from evernear.evaluation.verdict import Rule, System, Verdict

    index["network_sha256"] = network
    forged_verdict = Verdict.of(
        [Rule(name="test", passed=True, reason="Trust me.")],
        candidate=System(name="", network_sha256=network, index_digest=""),
        champion=None,
        dataset_digest=verdict["dataset_digest"],
    )
    return forge(
        release, path, index_json=json.dumps(index).encode(), verdict_json=forged_verdict.model_dump_json().encode()
    )


def test_consistent_forgery_runs_no_code_without_trust(
    release: PackedRelease, registry: Registry, image: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "proof"
    hostile_release = restamp(hostile(release, tmp_path / "first.mar", marker), tmp_path / "evil.mar")
    registry.publish(release.archive)  # the same version with other content

    output = evernear("registry", "show", hostile_release.archive, "--json", store=registry.uri)
    assert output.returncode == 0, output.stderr
    assert json.loads(output.stdout)["lineage"]["own_handler"] is False
    rejected = evernear("inspect", "run", hostile_release.archive, "--image", image, store=registry.uri, cwd=tmp_path)
    assert "can run arbitrary code" in error_of(rejected, 3)
    assert not marker.exists()

    # Even with --trust, the handler does not run and a plain pickle is not accepted as a network.
    trusted = evernear(
        "inspect", "run", hostile_release.archive, "--image", image, "--trust", store=registry.uri, cwd=tmp_path
    )
    assert "is not a TorchScript network" in error_of(trusted, 3)
    assert not marker.exists()


@pytest.mark.parametrize("content", [None, b"", b"no zip", "half"])
def test_invalid_archive_is_rejected(release: PackedRelease, tmp_path: Path, content: bytes | str | None) -> None:
    archive = tmp_path / "x.mar"
    data = content
    if content == "half":  # it ends in network.pt, a zip as well
        with zipfile.ZipFile(release.archive) as members:
            network = members.getinfo("network.pt").header_offset
            end = min(member.header_offset for member in members.infolist() if member.header_offset > network)
        data = release.archive.read_bytes()[:end]
    if isinstance(data, bytes):
        archive.write_bytes(data)
    rejected = f" {archive} {'is not a release' if content == 'half' else 'cannot be read'}"
    assert rejected in error_of(evernear("registry", "show", archive), 3)
    for trust in ([], ["--trust"]):
        refused = error_of(evernear("inspect", "run", archive, "--image", archive, *trust), 3)
        assert (f" {archive} is neither a file nor the version" if content is None else rejected) in refused


def edited(packed: PackedRelease, name: str, **changes: object) -> bytes:
    """The JSON of the part ``name`` with other fields."""
    with zipfile.ZipFile(packed.archive) as members:
        return json.dumps(json.loads(members.read(name)) | changes).encode()


@pytest.mark.parametrize(
    ("name", "changes", "threshold", "message"),
    [
        ("index.json", {"network_sha256": "0" * 64}, {}, "contains vectors of network 000000000000"),
        ("index.json", {"metric": "hamming"}, {}, "is not a valid"),
        ("index.json", {}, {"threshold": 2.0}, "contradicts"),
        ("preprocessing.json", {"height_px": 9}, {}, "contradicts"),
        ("verdict.json", {"rules": "none"}, {}, "not a valid verdict"),
    ],
)
def test_parts_and_manifest_that_contradict_each_other_are_rejected(
    release: PackedRelease,
    tmp_path: Path,
    name: str,
    changes: dict[str, Any],
    threshold: dict[str, float],
    message: str,
) -> None:
    forged = replace(release, manifest=release.manifest.model_copy(update=threshold))
    part = {name.replace(".", "_"): edited(release, name, **changes)}
    archive = forge(forged, tmp_path / "forged.mar", **part).archive
    assert message in error_of(evernear("registry", "show", archive), 3)


def test_show_escapes_control_characters(release: PackedRelease, tmp_path: Path) -> None:
    labels = tuple(f"\x1b]0;owned\x07{label}" for label in release.manifest.labels)
    named = replace(release, manifest=release.manifest.model_copy(update={"labels": labels}))
    index = edited(release, "index.json", labels=labels)
    output = evernear("registry", "show", forge(named, tmp_path / "odd.mar", index_json=index).archive)
    assert output.returncode == 0, output.stderr
    assert "\\x1b]0;owned" in output.stdout
    assert all(line.isprintable() for line in output.stdout.splitlines())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("make", NO_FILES)
def test_special_file_is_no_image(release: PackedRelease, tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x")
    completed = evernear("inspect", "run", release.archive, "--trust", "--image", tmp_path / "x")
    assert completed.returncode == DataError.exit_code
    assert completed.stdout.startswith(f"{tmp_path / 'x'}: The file cannot be read: ")
