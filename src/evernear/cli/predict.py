"""``evernear predict``: ask what serves. Imports neither torch nor FAISS."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from evernear.cli.options import ConfigOption, JsonOption, SetOption, WorkdirOption, settings_of
from evernear.errors import EvernearError


def predict(
    images: Annotated[list[Path], typer.Argument(help="PNG or JPEG files.", metavar="IMAGE...")],
    config: ConfigOption = None,
    overrides: SetOption = None,
    workdir: WorkdirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask the serving release what the images show."""
    from evernear.serving.client import Client

    client = Client.of(settings_of(None, config, overrides, workdir))
    refused: EvernearError | None = None
    for image in images:
        try:
            answer: dict[str, Any] = client.predict_file(image)
        except EvernearError as error:
            if len(images) == 1:
                raise
            refused, answer = error, {"error": str(error)}
        print(json.dumps({"image": str(image), **answer}) if as_json else _spoken(image, answer))
    if refused is not None:
        sys.exit(refused.exit_code)


def _spoken(image: Path, answer: dict[str, Any]) -> str:
    if "error" in answer:
        return f"{image}: {answer['error']}"
    near = ", ".join(f"{n['label']} at {n['dist']:.3f}" for n in answer["neighbors"])
    label = f"unknown (nearest {answer['pred']})" if answer["unknown"] else answer["pred"]
    return f"{image}: {label}, distance {answer['dist']:.3f}, neighbours {near}, release {answer['version']}"
