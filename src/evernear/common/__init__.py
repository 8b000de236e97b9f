"""Modules that all packages use: the store, the disk, output, run records, threads."""
