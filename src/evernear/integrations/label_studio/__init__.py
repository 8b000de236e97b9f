"""The review queue and suspect labels as Label Studio tasks."""
