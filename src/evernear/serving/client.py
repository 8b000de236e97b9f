"""Ask a running server over REST. Imports neither torch nor FAISS."""

from pathlib import Path
from typing import Any

import requests
from pydantic import ValidationError

from evernear.errors import DataError, PredictionRefused, ServingError, Unreachable
from evernear.serving.connection import START_HINT, endpoints, home_of, read_key
from evernear.serving.management import reason_of
from evernear.serving.messages import Prediction
from evernear.settings import Settings


class Client:
    """A client of the model at ``url``, which ends in ``/predictions/<model>``; one per thread."""

    def __init__(self, url: str, key: str, timeout_s: float, max_size_bytes: int) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._max_size_bytes = max_size_bytes
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy of the environment has no business on loopback
        self._session.headers["Authorization"] = f"Bearer {key}"

    @staticmethod
    def of(settings: Settings) -> "Client":
        """A client of the server of a working directory.

        Raises:
            Unreachable: none runs.
        """
        home = home_of(settings.workdir)
        url = f"{endpoints(home).inference_url}/predictions/{settings.serving.model_name}"
        limits = settings.serving
        return Client(url, read_key(home, "inference"), limits.response_timeout_s, limits.max_request_size_bytes)

    def predict(self, image: bytes, version: str | None = None) -> Prediction:
        """Recognise the content of a PNG or JPEG file, with a named ``version`` or the default one.

        Raises:
            Unreachable: nobody answers.
            PredictionRefused: the image or the request is at fault.
            ServingError: the server is at fault, or takes longer than the timeout.
        """
        if len(image) > self._max_size_bytes:  # the server would hang up in the middle of it
            raise PredictionRefused(
                f"The image has {len(image)} bytes, of {self._max_size_bytes} that the server takes."
            )
        url = f"{self._url}/{version}" if version else self._url
        headers = {"Content-Type": "application/octet-stream"}
        try:
            response = self._session.post(url, data=image, headers=headers, timeout=self._timeout_s)
        except requests.ReadTimeout:
            raise ServingError(f"No prediction from {url} within {self._timeout_s:g} s.") from None
        except requests.RequestException:
            raise Unreachable(f"TorchServe does not answer at {url}; {START_HINT}.") from None
        if response.status_code >= 500:
            raise ServingError(f"TorchServe failed: {reason_of(response)}")
        if not response.ok:
            raise PredictionRefused(reason_of(response))
        try:
            return Prediction.model_validate_json(response.content)
        except ValidationError:
            raise ServingError(f"What answers at {url} is no evernear release.") from None

    def predict_file(self, path: Path, version: str | None = None) -> dict[str, Any]:
        """`predict` on a file, as the JSON object that the server sent.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            image = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from None
        return self.predict(image, version).model_dump(mode="json")
