"""Options of `evernear predict` that are checked before any request."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from evernear.cli import app
from evernear.errors import ServerUnreachableError, SettingsError


def predict(*arguments: str) -> None:
    done = CliRunner().invoke(app, ["predict", *arguments])
    assert done.exception is not None
    raise done.exception


@pytest.mark.parametrize("target", ["localhost:8080", "127.0.0.1:8080", "http://localhost", "me@there", "a b", "a\nb"])
def test_target_must_be_a_host_without_scheme_or_port(target: str) -> None:
    with pytest.raises(SettingsError, match="pass the port as --port") as caught:
        predict("image.png", "--target", target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("target", ["::1", "[::1]"])
def test_target_accepts_ipv6_with_and_without_brackets(target: str, tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    image.write_bytes(b"")
    with pytest.raises(ServerUnreachableError, match=r"http://\[::1\]:1;"):
        predict(str(image), "--target", target, "--port", "1")
