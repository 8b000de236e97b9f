"""TorchServe's way into the prediction core; `evernear.release.archive` puts this file into every archive.

What is refused, and what is not: PNG and JPEG are taken, told by their content. Palette, alpha (laid over white),
CMYK, 16-bit grey (its upper 8 bits) and any size are decoded as ingest decodes them. Refused with 400 and a sentence,
each alone in its batch: no image, an empty, truncated, broken or animated one, another format, more pixels than
`serving.max_pixels`, a structure that would make decoding long (`evernear.data.image_file`), bad JSON or base64, a form
without one of the fields ``data``, ``image``, ``file``. What never gets here is refused by the frontend: a request
larger than `serving.max_request_size_bytes` (413), a form that cannot be read (400).

A batch is answered as a whole, so decoding ends after half of the response timeout, small images first; what is left
then gets 503.
"""

import logging
from http import HTTPStatus
from pathlib import Path
from typing import Any

from evernear.release.archive_reader import open_parts
from evernear.release.manifest import ReleaseManifest
from evernear.serving.core import Answered, Core
from evernear.serving.forms import image_of
from evernear.serving.messages import Prediction, Refusal
from evernear.serving.metrics import METRICS, Emit, Labels, Meter
from evernear.serving.query_log import QueryLog

DECODE_SHARE = 0.5
"""Of the response timeout, after which TorchServe replaces the worker and fails its whole batch."""
_METRICS_LOGGER = "ts.metrics.caching_metric"


class EmbeddingHandler:
    """The one class of this module: TorchServe calls ``initialize`` once and ``handle`` for each batch."""

    def initialize(self, context: Any) -> None:
        """Check every part of the unpacked release against its manifest, then load it."""
        parts = open_parts(Path(context.system_properties["model_dir"]))
        self._core = Core.open(parts)
        self._decode_timeout_s = DECODE_SHARE * float(context.model_yaml_config["responseTimeout"])
        # TorchServe writes a line for each batch to the log, through a pipe and two regular expressions.
        logging.getLogger().setLevel(logging.WARNING)
        logging.getLogger(_METRICS_LOGGER).setLevel(logging.INFO)
        self._meter = _meter(parts.manifest)
        self._meter.start()
        self._log = QueryLog.of_environment(parts)
        if self._log:
            self._log.start()

    def handle(self, data: list[dict[str, bytes]], context: Any) -> list[bytes]:
        """Answer a batch of requests, each with its own status."""
        answered = self._core.answer([image_of(fields) for fields in data], self._decode_timeout_s)
        for position, answer in enumerate(answered.answers):
            context.set_response_content_type(position, "application/json")
            if isinstance(answer, Refusal):
                context.set_response_status(answer.code, HTTPStatus(answer.code).phrase, position)
        self._count(answered)
        return [answer.model_dump_json().encode() for answer in answered.answers]

    def _count(self, answered: Answered) -> None:
        predictions = [answer for answer in answered.answers if isinstance(answer, Prediction)]
        if self._log:
            self._log.note(predictions, answered.embeddings, answered.images)
        self._meter.batch(
            outcomes=[answer.type if isinstance(answer, Refusal) else "ok" for answer in answered.answers],
            distances=[prediction.dist for prediction in predictions],
            unknown=sum(prediction.unknown for prediction in predictions),
            stages_s={"decode": answered.decode_s, "network": answered.network_s, "search": answered.search_s},
        )


def _meter(manifest: ReleaseManifest) -> Meter:
    created_s = manifest.created.timestamp()
    return Meter(_torchserve_emit(), manifest.version, manifest.network_sha256, created_s, manifest.threshold)


def _torchserve_emit() -> Emit:
    """TorchServe reads metrics from the worker's output; those that its configuration lacks it leaves out."""
    from ts.metrics.caching_metric import CachingMetric
    from ts.metrics.metric_type_enum import MetricTypes

    known = {
        name: CachingMetric(name, metric.unit, list(metric.labels), MetricTypes(metric.kind))
        for name, metric in METRICS.items()
    }

    def emit(name: str, value: float, labels: Labels) -> None:
        known[name].add_or_update(value, list(labels))

    return emit
