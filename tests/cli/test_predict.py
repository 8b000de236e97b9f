"""`evernear predict` before anything is asked."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from evernear.cli import app
from evernear.errors import ServerUnreachableError, SettingsError


def predict(*words: str) -> None:
    done = CliRunner().invoke(app, ["predict", *words])
    assert done.exception is not None
    raise done.exception


@pytest.mark.parametrize("target", ["localhost:8080", "127.0.0.1:8080", "http://localhost", "me@there", "a b", "a\nb"])
def test_a_target_is_a_host_alone(target: str) -> None:
    with pytest.raises(SettingsError, match="pass the port as --port") as caught:
        predict("image.png", "--target", target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("target", ["::1", "[::1]"])
def test_an_address_of_version_6_may_have_its_brackets(target: str, tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    image.write_bytes(b"")
    with pytest.raises(ServerUnreachableError, match=r"http://\[::1\]:1;"):
        predict(str(image), "--target", target, "--port", "1")
