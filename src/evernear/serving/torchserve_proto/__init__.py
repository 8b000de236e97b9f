"""TorchServe's gRPC messages, generated from ``inference.proto``."""
