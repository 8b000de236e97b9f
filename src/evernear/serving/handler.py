"""TorchServe's way into the prediction core; `evernear.release.archive` puts this file into every archive."""

from pathlib import Path
from typing import Any

from evernear.errors import DataError
from evernear.release.parts import open_parts
from evernear.serving.core import Core
from evernear.serving.forms import image_of
from evernear.serving.messages import Refusal


class EmbeddingHandler:
    """The one class of this module: TorchServe calls ``initialize`` once and ``handle`` for each batch."""

    def initialize(self, context: Any) -> None:
        """Check every part of the unpacked release against its manifest, then load it."""
        self._core = Core.open(open_parts(Path(context.system_properties["model_dir"])))

    def handle(self, data: list[dict[str, bytes]], context: Any) -> list[bytes]:
        """Answer a batch of requests, each with its own status."""
        answers = self._core.predict([_image_or_refusal(fields) for fields in data])
        for position, answer in enumerate(answers):
            context.set_response_content_type(position, "application/json")
            if isinstance(answer, Refusal):
                context.set_response_status(answer.code, "Bad Request", position)
        return [answer.model_dump_json().encode() for answer in answers]


def _image_or_refusal(fields: dict[str, bytes]) -> bytes | Refusal:
    try:
        return image_of(fields)
    except DataError as error:
        return Refusal(message=str(error))
