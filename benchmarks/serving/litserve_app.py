"""The core behind LitServe and its batching: ``litserve_app.py PARTS PORT``."""

import base64
import sys
from pathlib import Path

import litserve

from evernear.release.archive_reader import open_parts
from evernear.serving.core import Predictor
from evernear.serving.responses import Prediction, Rejection
from evernear.settings import ServingSettings


class Api(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.core = Predictor.open(open_parts(Path(sys.argv[1])))

    def decode_request(self, request: dict[str, str]) -> bytes:
        return base64.b64decode(request["data"])

    def batch(self, inputs: list[bytes]) -> list[bytes]:
        return inputs

    def predict(self, images: list[bytes]) -> list[Prediction | Rejection]:
        return self.core.predict(images)

    def unbatch(self, output: list[Prediction | Rejection]) -> list[Prediction | Rejection]:
        return output

    def encode_response(self, output: Prediction | Rejection) -> dict[str, object]:
        return output.model_dump()


if __name__ == "__main__":
    api = Api(max_batch_size=ServingSettings().batch_size, batch_timeout=0.001)
    server = litserve.LitServer(api, accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", generate_client_file=False)
