"""The review queue and suspect labels as tasks of Label Studio."""
