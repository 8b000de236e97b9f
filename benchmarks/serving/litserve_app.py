"""LitServe and its batching: ``litserve_app.py DIRECTORY PORT``."""

import base64
import json
import sys
from pathlib import Path

import litserve
from recognizers import Answer, open_recognizer

from evernear.settings import ServingSettings


class Api(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.recognize = open_recognizer(Path(sys.argv[1]))

    def decode_request(self, request: dict[str, str]) -> bytes:
        return base64.b64decode(request["data"])

    def batch(self, inputs: list[bytes]) -> list[bytes]:
        return inputs

    def predict(self, images: list[bytes]) -> list[Answer]:
        return self.recognize(images)

    def unbatch(self, output: list[Answer]) -> list[Answer]:
        return output

    def encode_response(self, output: Answer) -> dict[str, object]:
        _, answer = output
        return json.loads(answer)


if __name__ == "__main__":
    api = Api(max_batch_size=ServingSettings().batch_size, batch_timeout=0.001)
    server = litserve.LitServer(api, accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", generate_client_file=False)
