"""What a person looks at: curves, the verdict's card, and the outcome of a run."""
