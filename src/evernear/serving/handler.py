"""TorchServe's entry point to `Predictor`. The handler in every archive imports it.

It accepts PNG, JPEG, WebP and HEIC images of any size, and detects the format from the content.
Images with a palette, transparency, CMYK colors or 16-bit channels are decoded as in ingest
(`evernear.data.reduction`).

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
from collections.abc import Iterator, Sequence
from functools import cache
from http import HTTPStatus
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evernear.common.masking import mask_streams
from evernear.common.processes import exempt_loaded_objects
from evernear.release.archive_reader import ReleaseParts, open_parts
from evernear.release.drift_baseline import DriftBaseline
from evernear.release.manifest import DRIFT_BASELINE_FILE
from evernear.serving.core import BatchResult, Predictor
from evernear.serving.metrics import METRICS, Emit, Labels, Meter
from evernear.serving.query_log import QueryLog, Request
from evernear.serving.query_log_files import encode_embedding
from evernear.serving.request_parsing import image_from_fields
from evernear.serving.responses import EMBEDDING_FIELD, Prediction, Rejection
from evernear.serving.tracing import TRACE_FIELD, record_prediction, tracer

DECODE_SHARE = 0.5
"""Share of the response timeout that decoding may take. If the timeout expires, TorchServe replaces
the worker, and the whole batch fails."""
PROBE_HEADER = "evernear-probe"
_METRICS_LOGGER = "ts.metrics.caching_metric"


class EmbeddingHandler:
    """TorchServe calls ``initialize`` once and ``handle`` for each batch."""

    def initialize(self, context: Any) -> None:
        """Verify every part of the unpacked release against its manifest, and load it."""
        from ts.protocol import otf_message_handler

        mask_streams()
        parts = open_parts(Path(context.system_properties["model_dir"]))
        self._predictor = Predictor.open(parts)
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
        images = [image_from_fields(fields) for fields in data]
        result = self._predictor.predict_batch(images, self._decode_timeout_s)
        ids = [context.get_request_id(position) or "" for position in range(len(data))]
        for position, response in enumerate(result.responses):
            context.set_response_content_type(position, "application/json")
            if isinstance(response, Rejection):
                context.set_response_status(response.code, HTTPStatus(response.code).phrase, position)
        probes = [_is_probe(context, position) for position in range(len(data))]
        self._record(result, probes)
        self._log_queries(result, images, probes, ids)
        self._trace(data, context, result, started_ns)
        wanted = [_wants_embedding(fields, context, position) for position, fields in enumerate(data)]
        responses = _with_embeddings(result, wanted)
        return [_body(response, id_) for response, id_ in zip(responses, ids, strict=True)]

    def _trace(self, data: list[dict[str, bytes]], context: Any, result: BatchResult, started_ns: int) -> None:
        for position, (fields, response) in enumerate(zip(data, result.responses, strict=True)):
            field = fields.get(TRACE_FIELD)
            parent = bytes(field).decode("latin-1") if field else context.get_request_header(position, TRACE_FIELD)
            attributes = {
                "evernear.release": self._version,
                "evernear.batch_size": len(data),
                "evernear.outcome": _outcome(response),
            }
            record_prediction(self._tracer, parent or "", started_ns, _stages_s(result), **attributes)

    def _log_queries(
        self, result: BatchResult, images: list[bytes | Rejection], probes: Sequence[bool], ids: Sequence[str]
    ) -> None:
        if not self._query_log:
            return
        answered = [
            (position, response, image)
            for position, (response, image) in enumerate(zip(result.responses, images, strict=True))
            if isinstance(response, Prediction) and not isinstance(image, Rejection)
        ]
        of_clients = np.array([not probes[position] for position, _, _ in answered], np.bool_)
        logged = [row for row, is_client in zip(answered, of_clients, strict=True) if is_client]
        if logged:
            self._query_log.record(
                [response for _, response, _ in logged],
                _rows(result.embeddings, of_clients),
                _rows(result.images, of_clients),
                [Request(ids[position], image) for position, _, image in logged],
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


def _body(response: Prediction | Rejection, id_: str) -> bytes:
    """The id is TorchServe's request id, as in the ``x-request-id`` header of HTTP responses."""
    if isinstance(response, Prediction):
        response = response.model_copy(update={"id": id_})
    return response.model_dump_json().encode()


def _wants_embedding(fields: dict[str, bytes], context: Any, position: int) -> bool:
    return EMBEDDING_FIELD in fields or bool(context.get_request_header(position, EMBEDDING_FIELD))


def _with_embeddings(result: BatchResult, wanted: Sequence[bool]) -> Iterator[Prediction | Rejection]:
    """Yield the responses. Predictions for which ``wanted`` is set also contain the embedding."""
    embeddings = iter(() if result.embeddings is None else result.embeddings)
    for response, is_wanted in zip(result.responses, wanted, strict=True):
        if not isinstance(response, Prediction):
            yield response
            continue
        embedding = next(embeddings)
        yield response.model_copy(update={"embedding": encode_embedding(embedding)}) if is_wanted else response


def _is_probe(context: Any, position: int) -> bool:
    """The frontend removes the probe header from all requests that are not readiness probes."""
    return bool(context.get_request_header(position, PROBE_HEADER))


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
