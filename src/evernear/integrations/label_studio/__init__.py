"""Convert the review queue and suspect labels to Label Studio tasks."""
