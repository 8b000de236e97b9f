"""Measure candidate and champion, both as served, on the same frozen test split, and decide on promotion."""
