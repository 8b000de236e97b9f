"""TorchServe's entry point to `Predictor`. The handler in every archive imports it.

It accepts PNG, JPEG, WebP and HEIC images of any size, and detects the format from the content.
Images with a palette, transparency, CMYK colors or 16-bit channels are decoded as in ingest
(`evernear.data.reduction`).

Instead of a file, the preprocessing server sends the pixels of up to 32 images in one request, and
names their preprocessing. A release with another preprocessing rejects them with status 409.

An invalid request is rejected with status 400 and a message, without affecting the rest of the
batch. It has no image, contains invalid JSON or base64, or is a form without a ``data``, ``image``
or ``file`` field. An image is invalid if it is empty, truncated, broken or animated, has a
different format, has more pixels than `serving.max_pixels`, or has a structure that makes decoding
slow (`evernear.data.image_file`). The frontend itself rejects requests larger than
`serving.max_request_size_bytes` (413) and malformed forms (400).

All requests in a batch are answered at the same time. Decoding therefore stops after half of the
response timeout. Small images go first. Those that are not decoded in time get status 503.
"""

import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from http import HTTPStatus
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evernear.common.masking import mask_streams
from evernear.common.processes import exempt_loaded_objects
from evernear.data.preprocess import Pixels
from evernear.release.archive_reader import ReleaseParts, open_parts
from evernear.release.drift_baseline import DriftBaseline
from evernear.release.manifest import DRIFT_BASELINE_FILE
from evernear.serving.core import BatchResult, Predictor
from evernear.serving.metrics import METRICS, Emit, Labels, Meter
from evernear.serving.query_log import QueryLog, Request
from evernear.serving.query_log_files import encode_embedding
from evernear.serving.request_parsing import images_from_fields
from evernear.serving.responses import EMBEDDING_FIELD, PIXELS_FIELD, Prediction, Rejection
from evernear.serving.tracing import TRACE_FIELD, record_prediction, tracer

DECODE_SHARE = 0.5
"""Share of the response timeout that decoding may take. If the timeout expires, TorchServe replaces
the worker, and the whole batch fails."""
PROBE_HEADER = "evernear-probe"
_METRICS_LOGGER = "ts.metrics.caching_metric"


@dataclass(frozen=True)
class _Query:
    """An image in a request. ``parent`` is its trace."""

    image: bytes | Pixels | Rejection
    id: str
    parent: str
    is_probe: bool
    wants_embedding: bool


class EmbeddingHandler:
    """TorchServe calls ``initialize`` once and ``handle`` for each batch."""

    def initialize(self, context: Any) -> None:
        """Verify every part of the unpacked release against its manifest, and load it."""
        from ts.protocol import otf_message_handler

        mask_streams()
        parts = open_parts(Path(context.system_properties["model_dir"]))
        self._predictor = Predictor.open(parts)
        self._batch_size = int(context.model_yaml_config["batchSize"])
        self._decode_timeout_s = DECODE_SHARE * float(context.model_yaml_config["responseTimeout"])
        # For each batch, TorchServe would write a line and a metric, which pass through a pipe and
        # regular expressions. It would receive each field of a request with two system calls.
        logging.getLogger().setLevel(logging.WARNING)
        logging.getLogger(_METRICS_LOGGER).setLevel(logging.INFO)
        context.metrics.add_time = lambda *_, **__: None
        otf_message_handler._retrieve_buffer = _read_buffered  # pyright: ignore[reportPrivateUsage]
        self._meter = _meter(parts)
        self._meter.start()
        self._version = parts.manifest.version
        self._tracer = tracer("evernear-serving")
        self._query_log = QueryLog.from_environment(parts)
        if self._query_log:
            self._query_log.start()
        exempt_loaded_objects()

    def handle(self, data: list[dict[str, bytes]], context: Any) -> list[bytes]:
        """Each response has its own status."""
        started_ns = time.time_ns()
        messages = [self._queries(fields, context, position) for position, fields in enumerate(data)]
        queries = [query for message in messages for query in message]
        images = [query.image for query in queries]
        result = self._predictor.predict_batch(images, self._decode_timeout_s, self._batch_size)
        probes = [query.is_probe for query in queries]
        self._record(result, probes)
        self._log_queries(result, queries)
        self._trace(result, queries, started_ns)
        responses = _with_ids_and_embeddings(result, queries)
        bodies: list[bytes] = []
        for position, message in enumerate(messages):
            answers = list(islice(responses, len(message)))
            context.set_response_content_type(position, "application/json")
            rejection = next((answer for answer in answers if isinstance(answer, Rejection)), None)
            if rejection is not None:
                context.set_response_status(rejection.code, HTTPStatus(rejection.code).phrase, position)
            bodies.append(_body(answers, rejection, is_list=PIXELS_FIELD in data[position]))
        return bodies

    def _queries(self, fields: dict[str, bytes], context: Any, position: int) -> list[_Query]:
        """The images of one request."""
        header: Callable[[str], str | None] = partial(context.get_request_header, position)
        images = images_from_fields(fields, self._predictor.manifest)
        traces = bytes(fields.get(TRACE_FIELD, b"")).decode("latin-1") or header(TRACE_FIELD) or ""
        parents = traces.split(",") if len(images) > 1 else [traces]
        id_ = context.get_request_id(position) or ""
        return [
            _Query(
                image=image,
                id=f"{id_}-{number}" if number else id_,
                parent=parents[number] if number < len(parents) else "",
                is_probe=bool(header(PROBE_HEADER)),  # the frontend removes the header from all other requests
                wants_embedding=EMBEDDING_FIELD in fields or bool(header(EMBEDDING_FIELD)),
            )
            for number, image in enumerate(images)
        ]

    def _trace(self, result: BatchResult, queries: Sequence[_Query], started_ns: int) -> None:
        for query, response in zip(queries, result.responses, strict=True):
            attributes = {
                "evernear.release": self._version,
                "evernear.batch_size": len(queries),
                "evernear.outcome": _outcome(response),
            }
            record_prediction(self._tracer, query.parent, started_ns, _stages_s(result), **attributes)

    def _log_queries(self, result: BatchResult, queries: Sequence[_Query]) -> None:
        if not self._query_log:
            return
        answered = [
            (query, response)
            for query, response in zip(queries, result.responses, strict=True)
            if isinstance(response, Prediction)
        ]
        of_clients = np.array([not query.is_probe for query, _ in answered], np.bool_)
        logged = [row for row, is_client in zip(answered, of_clients, strict=True) if is_client]
        if logged:
            self._query_log.record(
                [response for _, response in logged],
                _rows(result.embeddings, of_clients),
                _rows(result.images, of_clients),
                [Request(query.id, query.image if isinstance(query.image, bytes) else None) for query, _ in logged],
            )

    def _record(self, result: BatchResult, probes: Sequence[bool]) -> None:
        """Count client requests, but not readiness probes."""
        responses = [response for response, probe in zip(result.responses, probes, strict=True) if not probe]
        predictions = [response for response in responses if isinstance(response, Prediction)]
        if not responses:
            return
        self._meter.record_batch(
            outcomes=[_outcome(response) for response in responses],
            distances=[prediction.dist for prediction in predictions],
            unknown=sum(prediction.unknown for prediction in predictions),
            stages_s=_stages_s(result),
            neighbors=[neighbor.label == p.pred for p in predictions if not p.unknown for neighbor in p.neighbors],
        )


@cache
def _buffered(connection: socket.socket) -> BufferedReader:
    return connection.makefile("rb")


def _read_buffered(connection: socket.socket, size_bytes: int) -> bytes:
    """Exit, like TorchServe, when the frontend disconnects."""
    data = _buffered(connection).read(size_bytes)
    if len(data) < size_bytes:
        sys.exit(0)
    return data


def _body(answers: list[Prediction | Rejection], rejection: Rejection | None, *, is_list: bool) -> bytes:
    if rejection is not None:
        return rejection.model_dump_json().encode()
    texts = ",".join([answer.model_dump_json() for answer in answers])
    return (f"[{texts}]" if is_list else texts).encode()


def _with_ids_and_embeddings(result: BatchResult, queries: Sequence[_Query]) -> Iterator[Prediction | Rejection]:
    """Yield the responses. The id of the first image is TorchServe's request id, as in the
    ``x-request-id`` header of HTTP responses."""
    embeddings = iter(() if result.embeddings is None else result.embeddings)
    for response, query in zip(result.responses, queries, strict=True):
        if isinstance(response, Prediction):
            embedding = next(embeddings)
            update = {"id": query.id} | ({"embedding": encode_embedding(embedding)} if query.wants_embedding else {})
            yield response.model_copy(update=update)
        else:
            yield response


def _rows(array: NDArray[Any] | None, selected: NDArray[np.bool_]) -> NDArray[Any] | None:
    return None if array is None else array[selected]


def _outcome(response: Prediction | Rejection) -> str:
    return response.type if isinstance(response, Rejection) else "ok"


def _stages_s(result: BatchResult) -> dict[str, float]:
    return {"decode": result.decode_s, "network": result.network_s, "search": result.search_s}


def _meter(parts: ReleaseParts) -> Meter:
    manifest = parts.manifest
    reference = DriftBaseline.parse(parts.read(DRIFT_BASELINE_FILE), DRIFT_BASELINE_FILE).distances.tolist()
    return Meter(
        _torchserve_emit(),
        manifest.version,
        manifest.network_sha256,
        manifest.created.timestamp(),
        manifest.threshold,
        manifest.engine,
        manifest.metrics.get("label_right"),
        reference,
    )


def _torchserve_emit() -> Emit:
    """TorchServe parses the worker's output, and drops metrics that are not configured."""
    from ts.metrics.caching_metric import CachingMetric
    from ts.metrics.metric_type_enum import MetricTypes

    metrics = {
        name: CachingMetric(name, metric.unit, list(metric.labels), MetricTypes(metric.kind))
        for name, metric in METRICS.items()
    }

    def emit(name: str, value: float, labels: Labels) -> None:
        metrics[name].add_or_update(value, list(labels))

    return emit
