"""The handler of a stub: a release that answers its stored queries as recorded, without torch.

It shows what the server does with requests. A body ``hold PATH`` creates PATH, and keeps the worker
busy until PATH is deleted. The ``id`` of a prediction is the number of its batch.
"""

import json
import time
from pathlib import Path
from typing import Any


class Handler:
    def initialize(self, context: Any) -> None:
        directory = Path(context.system_properties["model_dir"])
        self._version = context.manifest["model"]["modelVersion"]
        self._queries = {
            (directory / query["file"]).read_bytes(): query
            for query in json.loads((directory / "smoke.json").read_bytes())
        }
        self._batches = 0

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[bytes]:
        self._batches += 1
        return [self._answer(fields, context, position) for position, fields in enumerate(data)]

    def _answer(self, fields: dict[str, Any], context: Any, position: int) -> bytes:
        context.set_response_content_type(position, "application/json")
        body = bytes(fields.get("body") or fields.get("data") or b"")
        if body.startswith(b"hold "):
            _hold(Path(body[5:].decode()))
        known = (query for image, query in self._queries.items() if body.startswith(image))
        if query := next(known, None):
            answer = {key: query[key] for key in ("pred", "dist", "unknown")}
            answer |= {"neighbors": [], "version": self._version, "id": str(self._batches)}
        else:
            context.set_response_status(400, "Bad Request", position)
            answer = {"code": 400, "type": "BadImage", "message": "The image is not a PNG, JPEG, WebP or HEIC image."}
        return json.dumps(answer).encode()


def _hold(path: Path) -> None:
    path.touch()
    while path.exists():
        time.sleep(0.01)
