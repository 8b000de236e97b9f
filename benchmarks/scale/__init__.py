"""Benchmarks with a million images or more."""
