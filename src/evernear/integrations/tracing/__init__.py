"""The exporter of OpenTelemetry traces. `evernear.serving.tracing` creates the spans."""
