"""Reports for people: training curves, the verdict card and the outcome of a run."""
