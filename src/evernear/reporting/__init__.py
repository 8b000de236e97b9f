"""Reports for users: training curves, the verdict card and the outcome of a run."""
