"""The tracing plugin, which exports traces if ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set."""

import os
from typing import TYPE_CHECKING

from evernear.common.plugins import Plugin

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


def _tracer_provider(service: str) -> "TracerProvider | None":
    if not os.environ.get(ENDPOINT_VARIABLE):
        return None
    from evernear.integrations.tracing.exporter import exporting_provider

    return exporting_provider(service)


PLUGIN = Plugin(install="evernear[tracing]", tracer_provider=_tracer_provider)
