"""Modules that every package uses: the store, disk files, output, run records and threads."""
