"""A prediction is one trace, from the client through the preprocessing server to TorchServe's
handler."""

import base64
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import httpx
import pytest
from opentelemetry.trace import NoOpTracer

from evernear.common.output import JsonFormatter
from evernear.common.store import open_store
from evernear.release.registry import Registry
from evernear.serving.configuration import model_store
from evernear.serving.endpoints import read_key
from evernear.serving.tracing import request_span, trace_fields, trace_id, tracer
from tests.collector import CLIENT_SPAN, Collector, attributes, collecting, parent
from tests.prep_server import make_champion, prep_client
from tests.releases import MakeRelease
from tests.served import serving

TRACE, OTHER_TRACE = "0af7651916cd43dd8448eb211c80319c", "1" * 32


@pytest.fixture
def configured_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as collector:
        for name, value in collector.environment.items():
            monkeypatch.setenv(name, value)
        tracer.cache_clear()
        yield collector
        tracer("evernear-prep").span_processor.shutdown()
        tracer.cache_clear()


@contextmanager
def captured_log() -> Iterator[StringIO]:
    """The JSON log of the preprocessing server."""
    stream, log = StringIO(), logging.getLogger("evernear.serving.http.app")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def test_prediction_is_one_trace_through_both_servers(
    make_release: MakeRelease, tmp_path: Path, configured_collector: Collector
) -> None:
    with serving(make_release(), tmp_path) as served:
        registry = Registry(open_store(served.settings.store_uri))
        registry.publish(model_store(served.home) / "release.mar")
        make_champion(served.settings.store_uri, served.manifest.version)
        image, _ = served.parts.smoke_queries()[0]
        body = {"data": base64.b64encode(image).decode()}
        with captured_log() as log, prep_client(served.settings) as prep:
            answer = prep.post("/predict", json=body, headers=parent(TRACE) | {"X-Request-Id": "from-the-client"})
            assert answer.status_code == 200
            spans = configured_collector.wait_for(
                TRACE, "POST /predict", "prepare", "call predictor", "predict", "search"
            )
        serving_settings = served.settings.serving
        url = f"http://127.0.0.1:{serving_settings.inference_port}/predictions/embedding"
        headers = parent(OTHER_TRACE) | {"Authorization": f"Bearer {read_key(served.home, 'inference')}"}
        assert httpx.post(url, content=b"no image", headers=headers).status_code == 400
        _, rejected = configured_collector.wait_for(OTHER_TRACE, "predict")["predict"]
    (logged,) = (json.loads(line) for line in log.getvalue().splitlines())
    assert (logged["request"], logged["trace"]) == ("from-the-client", TRACE)
    services = {name: service for name, (service, _) in spans.items()}
    assert services["call predictor"] == "evernear-prep"
    assert services["predict"] == services["search"] == "evernear-serving"
    request, call, predict, search = (
        spans[name][1] for name in ("POST /predict", "call predictor", "predict", "search")
    )
    assert request.parent_span_id.hex() == CLIENT_SPAN
    assert attributes(request)["evernear.request"] == "from-the-client"
    assert attributes(request)["http.response.status_code"] == 200
    assert call.parent_span_id == request.span_id
    assert predict.parent_span_id == call.span_id
    assert search.parent_span_id == predict.span_id
    assert attributes(predict)["evernear.release"] == attributes(request)["evernear.release"] == served.manifest.version
    assert attributes(predict)["evernear.outcome"] == "ok"
    assert rejected.parent_span_id.hex() == CLIENT_SPAN
    assert attributes(rejected)["evernear.outcome"] != "ok"
    assert call.start_time_unix_nano <= predict.start_time_unix_nano <= search.end_time_unix_nano


def test_client_s_trace_is_passed_on_without_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    tracer.cache_clear()
    with request_span(tracer("evernear-prep"), parent(TRACE)["traceparent"]) as span:
        assert not span.is_recording()
        assert trace_id(span) == TRACE
        assert trace_fields() == {"traceparent": parent(TRACE)["traceparent"].encode()}
    with request_span(tracer("evernear-prep"), "") as span:
        assert trace_id(span) == ""
        assert trace_fields() == {}


def test_missing_sdk_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    tracer.cache_clear()
    assert isinstance(tracer("evernear-prep"), NoOpTracer)
    tracer.cache_clear()
    assert caplog.messages == [
        "Traces are not exported: opentelemetry.sdk.trace is not installed; run `pip install 'evernear[tracing]'`."
    ]
