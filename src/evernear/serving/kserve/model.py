"""What the predictor and the transformer have in common: a KServe model that stands for one release."""

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kserve import Model
from prometheus_client import Counter, Gauge

from evernear.release.manifest import ReleaseManifest
from evernear.serving.kserve.messages import Images, Tensors, input_types, output_types, read_question, write_answer
from evernear.serving.messages import Prediction, Refusal

_IMAGES = Counter("evernear_images", "Images answered, by outcome.", ["model_name", "outcome"])
_RELEASE = Gauge("evernear_release_info", "1 for the release that is loaded.", ["model_name", "version"])


class ReleaseModel(Model):
    """The steps that KServe calls and times for each request: read and prepare, answer, write.

    Errors are `grpc_interceptor` exceptions, which become a status of either protocol.
    """

    def __init__(self, name: str, manifest: ReleaseManifest, max_images: int) -> None:
        super().__init__(name)
        self.manifest = manifest
        self.shape = manifest.preprocessing
        self._max_images = max_images
        # One at a time: a batch has the cores to itself, and the event loop stays free for probes.
        self._worker = ThreadPoolExecutor(1)
        self.ready = True
        _RELEASE.labels(name, manifest.version).set(1)

    @abstractmethod
    async def prepare(self, images: Images) -> Any:
        """Bring the images of one request to the form that `answer` takes."""

    @abstractmethod
    async def answer(self, prepared: Any, headers: dict[str, str] | None) -> list[Prediction | Refusal]:
        """Recognise them. ``headers`` are those of the request."""

    async def can_answer(self) -> bool:
        """Whether a request would be answered now: what a readiness probe asks."""
        return self.ready

    async def in_worker(self, function: Callable[..., Any], *args: Any) -> Any:
        """Await ``function``, run in the worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *args)

    async def preprocess(self, payload: Any, headers: dict[str, str] | None = None) -> Any:
        """KServe's first step."""
        question = read_question(payload, self.shape, self._max_images)
        return question, await self.prepare(question.images)

    async def predict(
        self, payload: Any, headers: dict[str, str] | None = None, response_headers: dict[str, str] | None = None
    ) -> Any:
        """KServe's second step."""
        question, prepared = payload
        return question, await self.answer(prepared, headers)

    async def postprocess(
        self, result: Any, headers: dict[str, str] | None = None, response_headers: dict[str, str] | None = None
    ) -> Any:
        """KServe's third step."""
        question, answers = result
        for answer in answers:
            outcome = "refused" if isinstance(answer, Refusal) else "unknown" if answer.unknown else "known"
            _IMAGES.labels(self.name, outcome).inc()
        return write_answer(question, answers, self.name)

    def validate(self, payload: Any) -> Any:
        """`preprocess` has validated it."""
        return payload

    def get_input_types(self) -> Tensors:
        """For the protocol's model metadata."""
        return input_types(self.shape)

    def get_output_types(self) -> Tensors:
        """For the protocol's model metadata."""
        return output_types()
