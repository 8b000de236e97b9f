"""``evernear predict``, as a user types it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from evernear.common.store import open_store
from evernear.release.registry import Registry
from evernear.serving.configuration import model_store
from tests import command_line, hostile
from tests.dataset_images import write_files
from tests.served import Served

PORTS = ("inference_port", "grpc_inference_port", "management_port")


def environment(served: Served, **variables: str) -> dict[str, str]:
    serving = served.settings.serving
    ports = {f"EVERNEAR_SERVING__{port.upper()}": str(getattr(serving, port)) for port in PORTS}
    return ports | {"EVERNEAR_WORKDIR": str(served.settings.workdir)} | variables


def predict(served: Served, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return command_line.evernear("predict", *words, environment=environment(served, **variables))


def lines(completed: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in completed.stdout.splitlines()]


@pytest.fixture(scope="module")
def image_folder(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images named by their labels, one of them in a subfolder."""
    directory = tmp_path_factory.mktemp("images")
    for number, (image, query) in enumerate(served.parts.smoke_queries()):
        file = directory / ("below" if number == 0 else ".") / f"{query.pred}-{number}.png"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(image)
    (directory / "notes.txt").write_text("no image")
    return directory


@pytest.mark.parametrize("format", ["rest", "grpc"])
def test_folder_and_file_give_one_line_per_image(served: Served, image_folder: Path, format: str) -> None:
    image = next(image_folder.glob("*.png"))
    completed = predict(served, str(image), "--image-file", str(image_folder), "--json", "--format", format)
    assert completed.returncode == 0
    assert completed.stderr == f"Skipped 1 file or folder that is no image in {image_folder}: notes.txt.\n"
    answers = lines(completed)
    assert [answer["image"] for answer in answers] == [str(image), *map(str, sorted(image_folder.rglob("*.png")))]
    for answer in answers:
        assert answer["pred"] == Path(str(answer["image"])).name[0]
        assert answer["version"] == served.manifest.version


@pytest.mark.parametrize("format", ["rest", "grpc"])
def test_photograph_beyond_the_limit_of_bytes_is_shrunk_with_the_same_answer(
    served: Served, tmp_path: Path, format: str
) -> None:
    registry = Registry(open_store((tmp_path / "store").as_uri()))
    registry.publish(model_store(served.home) / "release.mar")
    registry.set_champion(served.manifest.version, None)
    picture, images = hostile.noise("RGB", 400), tmp_path / "images"
    profile = [hostile.segment(0xE2, bytes(65_000))] * 120
    write_files(images, {"small.jpg": picture, "whole.jpg": hostile.insert(picture, *profile)})
    assert (images / "whole.jpg").stat().st_size > served.settings.serving.max_request_size_bytes
    completed = predict(served, str(images), "--json", "--format", format, EVERNEAR_STORE=registry.store.uri)
    assert completed.returncode == 0, completed.stderr
    small, whole = ({**answer, "image": "", "id": ""} for answer in lines(completed))
    assert small == whole


def test_photograph_beyond_the_limit_needs_the_release_to_be_shrunk(served: Served, tmp_path: Path) -> None:
    (tmp_path / "whole.png").write_bytes(bytes(served.settings.serving.max_request_size_bytes + 1))
    store = (tmp_path / "empty").as_uri()
    completed = predict(served, str(tmp_path / "whole.png"), EVERNEAR_STORE=store)
    assert completed.returncode == 3
    assert "It cannot be shrunk as the server's release does it: " in completed.stderr
    assert "Traceback" not in completed.stderr


def test_prints_a_table_with_a_row_per_image(served: Served, image_folder: Path) -> None:
    (image_folder / "odd [1].png").write_bytes(b"no image")
    completed = predict(served, "--image-file", str(image_folder))
    (image_folder / "odd [1].png").unlink()
    printed = completed.stdout
    assert completed.returncode == 3
    for image in image_folder.rglob("*.png"):
        (line,) = [line for line in printed.splitlines() if str(image) in line]
        assert served.manifest.version in line
    (line,) = [line for line in printed.splitlines() if "odd [1].png" in line]
    assert "not a PNG, JPEG, WebP or HEIC" in line


def test_json_output_has_a_line_per_rejected_image(served: Served, image_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no image")
    good = str(next(image_folder.glob("*.png")))
    completed = predict(
        served, str(tmp_path / "bad.png"), str(tmp_path / "absent.png"), good, "--json", "--format", "grpc"
    )
    assert completed.returncode == 3
    bad, absent, answered = lines(completed)
    assert "not a PNG, JPEG, WebP or HEIC" in str(bad["error"])
    assert "cannot be read" in str(absent["error"])
    assert "pred" in answered


@pytest.mark.parametrize("format", ["rest", "grpc"])
def test_rejections_and_servers_that_may_answer_later_have_distinct_exit_codes(
    served: Served, image_folder: Path, tmp_path: Path, format: str
) -> None:
    image = str(next(image_folder.glob("*.png")))
    (tmp_path / "bad.png").write_bytes(b"no image")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = ("--target", "127.0.0.1", "--port", str(silent.getsockname()[1]), "--format", format)
        cases = (
            (4, (image, *options, "--timeout-s", "0.3")),
            (4, (image, "--target", "127.0.0.1", "--port", "9", "--format", format)),
            (3, (str(tmp_path / "bad.png"), "--format", format)),
        )
        for code, words in cases:
            completed = predict(served, *words)
            assert completed.returncode == code, completed.stderr
            assert completed.stderr.startswith("evernear: ")
            assert len(completed.stderr.splitlines()) == 1


def test_prints_metadata_of_the_local_server(served: Served) -> None:
    registry = Registry(open_store(served.settings.store_uri))
    registry.publish(model_store(served.home) / "release.mar")
    printed = lines(predict(served, "--metadata", "--json"))[0]
    assert printed["version"] == served.manifest.version
    assert printed["labels"] == list(served.manifest.labels)
    assert (printed["height_px"], printed["channels"]) == (8, 1)
    printed_text = predict(served, "--metadata").stdout
    assert "threshold" in printed_text
    assert "{" not in printed_text, "not Python's notation"


def test_missing_images_are_reported(served: Served, tmp_path: Path) -> None:
    assert "No image: pass files" in predict(served).stderr
    assert "contains no image" in predict(served, "--image-file", str(tmp_path)).stderr
    assert "--tls requires --target" in predict(served, "x.png", "--tls").stderr
    assert "--csv and --json exclude each other" in predict(served, "x.png", "--csv", "--json").stderr
    assert "http://host/x.png is not a file; download it" in predict(served, "http://host/x.png").stderr


def test_another_port_is_not_answered_with_the_advice_to_start_the_server(served: Served, image_folder: Path) -> None:
    image = str(next(image_folder.glob("*.png")))
    completed = predict(served, image, "--port", "9")
    assert completed.stderr == "evernear: No server answers at http://127.0.0.1:9; check its host and port.\n"


@pytest.mark.parametrize("format", ["rest", "grpc"])
def test_reads_an_image_from_stdin_and_imports_no_heavy_modules(
    served: Served, image_folder: Path, format: str
) -> None:
    """Checks imports until a prediction is printed, rather than the time."""
    script = (
        "import sys; from evernear.cli.app import app\n"
        "try: app(sys.argv[1:])\n"
        "finally: print(sorted({'torch', 'faiss', 'numpy', 'PIL', 'minio', 'kfp', 'fastapi'} & set(sys.modules)))"
    )
    image = next(image_folder.glob("*.png"))
    command = [sys.executable, "-c", script, "predict", "--image-file", "-", "--json", "--format", format]
    with image.open("rb") as stdin:
        completed = subprocess.run(
            command, env=os.environ | environment(served), stdin=stdin, capture_output=True, text=True
        )
    answer, imported = completed.stdout.splitlines()
    assert (json.loads(answer)["image"], json.loads(answer)["pred"], imported) == ("-", image.name[0], "[]")
