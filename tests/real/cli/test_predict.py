"""Options of `evernear predict` that are checked before any request, and its progress display."""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from evernear.cli import predict as predict_command
from evernear.cli.app import app
from evernear.errors import DataError, ServerUnreachableError, SettingsError
from tests.dataset_images import saved


def predict(*arguments: str) -> None:
    completed = CliRunner().invoke(app, ["predict", *arguments])
    assert completed.exception is not None
    raise completed.exception


@pytest.mark.parametrize("target", ["localhost:8080", "127.0.0.1:8080", "http://localhost", "me@there", "a b", "a\nb"])
def test_target_must_be_a_host_without_scheme_or_port(target: str) -> None:
    with pytest.raises(SettingsError, match="pass the port as --port") as exc_info:
        predict("image.png", "--target", target)
    assert "\n" not in str(exc_info.value)


@pytest.mark.parametrize("target", ["::1", "[::1]"])
def test_target_accepts_ipv6_with_and_without_brackets(target: str, tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    image.write_bytes(b"")
    with pytest.raises(ServerUnreachableError, match=r"http://\[::1\]:1;"):
        predict(str(image), "--target", target, "--port", "1")


def test_folder_is_predicted_by_the_rule_for_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, other = tmp_path / "images", tmp_path / "other"
    (folder / "sub").mkdir(parents=True)
    other.mkdir()
    image = saved(Image.new("L", (8, 8)), "JPEG")
    names = {"a.JPG", "b.jfif", "c.jpe", "d.jpg_large", "e.1", "noext", "sub/f.webp"}
    for name in (*names, "../other/linked"):
        (folder / name).write_bytes(image)
    (folder / "broken.png").write_bytes(b"text with the suffix of an image")
    (folder / "notes.txt").write_bytes(b"text")
    (folder / "empty").touch()
    for litter in ("@eaDir/a.JPG", "._a.JPG"):
        (folder / litter).parent.mkdir(exist_ok=True)
        (folder / litter).write_bytes(image)
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to(other)
    (folder / "sub" / "up").symlink_to(folder)
    (folder / "gone.png").symlink_to("nowhere")
    found = {str(path.relative_to(folder)) for path in predict_command._files([folder])}
    assert found == {*names, "broken.png", "link/linked", "gone.png"}
    assert "Skipped 5 files or folders that are no images" in (shown := capsys.readouterr().err)
    assert "._a.JPG, @eaDir, empty, notes.txt, pipe" in shown


def test_folder_without_an_image_is_an_error_that_names_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(12):
        (tmp_path / f"{number:02}.txt").touch()
    with pytest.raises(DataError, match=f"The folder {tmp_path} contains no image"):
        list(predict_command._files([tmp_path]))
    assert "Skipped 12 files or folders that are no images" in (shown := capsys.readouterr().err)
    assert shown.endswith("08.txt, 09.txt and more.\n")


@pytest.mark.parametrize("arguments", [[""], ["--image-file", ""]])
def test_empty_path_is_not_the_current_directory(arguments: list[str]) -> None:
    with pytest.raises(SettingsError, match="path of an image is empty"):
        predict(*arguments, "--target", "127.0.0.1")


def test_name_that_is_not_utf8_is_escaped_and_the_rest_is_predicted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["a.png", os.fsdecode(b"caf\xe9.png"), "z.png"]
    answers: list[predict_command.Answer] = [(Path(name), {"pred": "7"}) for name in names]
    answers.append((Path(names[1]), DataError(f"{names[1]} cannot be read.")))
    assert predict_command._print_json(iter(answers)) == DataError.exit_code
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["image"] for line in lines] == ["a.png", r"caf\udce9.png", "z.png", r"caf\udce9.png"]
    assert lines[-1]["error"] == r"caf\udce9.png cannot be read."


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Files that an in-memory server answers."""

    def predict_all(client: object, files: list[Path], *_: object) -> Iterator[predict_command.Answer]:
        yield from ((file, {"pred": "7"}) for file in files)

    monkeypatch.setattr(predict_command, "_predict_all", predict_all)
    return [str(tmp_path / f"{number}.png") for number in range(3)]


@pytest.mark.parametrize(("count", "terminals", "shown"), [(3, "err", True), (1, "err", False), (3, "out err", False)])
def test_progress_is_shown_on_a_terminal_for_several_images(
    answered: list[str], monkeypatch: pytest.MonkeyPatch, count: int, terminals: str, shown: bool
) -> None:
    for variable in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    out, err = (Terminal() if name in terminals else io.StringIO() for name in ("out", "err"))
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    app(["predict", *answered[:count], "--json", "--target", "127.0.0.1"], standalone_mode=False)
    assert [line[:10] for line in out.getvalue().splitlines()] == ['{"image":"'] * count
    assert ("recognizing" in err.getvalue()) == shown
    assert ("3/3" in err.getvalue()) == shown


def test_interrupt_erases_the_progress() -> None:
    def answers() -> Iterator[predict_command.Answer]:
        yield Path("a.png"), DataError("unusable")
        raise KeyboardInterrupt

    terminal = Terminal()
    with pytest.raises(KeyboardInterrupt):
        list(predict_command._with_progress(answers(), 2, terminal))
    assert terminal.getvalue().endswith("\x1b[?25h\r\x1b[1A\x1b[2K")


def test_answers_are_printed_as_csv(capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"pred": "a, b", "unknown": True, "dist": 1.25, "version": "v", "neighbors": []}
    exit_code = predict_command._print_csv(iter([(Path("1.png"), answer), (Path("2.png"), DataError("No image."))]))
    assert exit_code == DataError.exit_code
    assert capsys.readouterr().out.splitlines() == [
        "image,answer,unknown,distance,release,error",
        '1.png,"a, b",true,1.2500,v,',
        "2.png,,,,,No image.",
    ]
