"""The exporter of OpenTelemetry traces. What is traced is in `evernear.serving.tracing`."""
