"""The pages. Each module has a function that returns its routes."""
