"""The pipelines, and what compiles and runs them. Read `continuous_training` first."""
